"""One save: each rank writes its share beside training, and the rank that is done last makes the whole of it.

    rank 0 … n-1   write __R_0.distcp into step-N.tmp-TOKEN, sync it, hand in what was written where
    the last one   .metadata, manifest.json, the rename to step-N; tells all; removes what is too old

Nobody waits here, so nobody can be waited for in a circle.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from phalanx.checkpoint.council import Council
from phalanx.checkpoint.files import Files, Writer
from phalanx.checkpoint.manifest import MANIFEST, Manifest
from phalanx.checkpoint.place import Fact
from phalanx.checkpoint.shares import Copies
from phalanx.checkpoint.shelf import Shelf
from phalanx.checkpoint.words import in_bytes, say
from phalanx.errors import CheckpointError

_FULL = "the disk is full."


@dataclass(frozen=True)
class Task:
    """What is to be saved, the same on all ranks but for the copies."""

    step: int
    number: int
    """Of this save, counted by the checkpointer."""
    token: str
    parts: tuple[str, ...]
    digest: str
    plans: list[SavePlan]
    metadata: Metadata
    keep: int | None
    bytes: int
    """Of all tensors, on all ranks."""


@dataclass(frozen=True)
class _Share:
    """What one rank hands in."""

    step: int
    digest: str
    results: list[WriteResult] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)
    error: str = ""


class Saving:
    """A save under way on this rank."""

    def __init__(self, task: Task, copies: Copies, council: Council, shelf: Shelf, note: Callable[..., None]) -> None:
        self._task, self._copies, self._council, self._shelf, self._note = task, copies, council, shelf, note
        self._aside, _ = shelf.place.names_for(task.step, task.token)
        self._started = time.monotonic()
        self._lost: BaseException | None = None
        # Not a daemon: an interpreter that ends waits for it, and does not tear torch down under its hands.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {task.step}", daemon=False)

    @property
    def step(self) -> int:
        return self._task.step

    def start(self) -> None:
        self._thread.start()

    def finish_own(self, timeout: float | None = None) -> bool:
        """Waits for this rank's part; whether it is done."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def finish(self, still: Callable[[float], None]) -> None:
        """Until all ranks are done; raises CheckpointError on all of them if there is no checkpoint then.

        ``still`` is called now and then with the seconds since the save began.
        """
        while not self.finish_own(timeout=10.0):
            still(time.monotonic() - self._started)
        if self._lost is not None:
            raise CheckpointError(f"the checkpoint of step {self.step} could not be agreed on: {self._lost}")
        error = self._council.hear(self._key("outcome"), lambda _: still(time.monotonic() - self._started))
        if error:
            raise CheckpointError(error)

    def _key(self, what: str) -> str:
        return f"save {self._task.number}/{what}"

    # ---- in the background

    def _run(self) -> None:
        try:
            if self._council.hand_in(self._key("share"), self._write_share()):
                self._tell(self._conclude())
        except Exception as error:  # noqa: BLE001  (the store is gone; `finish` tells the training loop)
            self._lost = error

    def _write_share(self) -> _Share:
        task = self._task
        files = Files(self._shelf.place, self._aside)
        try:
            self._shelf.place.make(self._aside)
            writer = Writer(files, self._aside)
            plan = writer.prepare_global_plan(task.plans)[self._council.rank]
            results = writer.write_data(plan, self._copies).wait()
        except Exception as error:  # noqa: BLE001  (whatever it is, all ranks are told)
            return _Share(task.step, task.digest, error=self._explain(error))
        return _Share(task.step, task.digest, results, files.facts)

    def _conclude(self) -> str:
        """The last rank: from shares to a checkpoint. Returns what went wrong."""
        shares: list[_Share] = self._council.collect(self._key("share"))
        try:
            if problem := _disagreement(shares):
                raise CheckpointError(problem)
            manifest, final = self._make_whole(shares)
        except Exception as error:  # noqa: BLE001  (whatever it is, all ranks are told)
            problem = str(error) if isinstance(error, CheckpointError) else self._explain(error)
            left = self._clear_away()
            return problem + (self._room() if problem.endswith(_FULL) else "") + left
        self._note("saved", step=self.step, seconds=time.monotonic() - self._started, bytes=manifest.bytes)
        try:
            self._shelf.prune(self._task.keep, final)
        except OSError as error:
            say(f"step {self.step} is saved, but an old checkpoint in {self._shelf.place} cannot be removed: {error}")
        return ""

    def _make_whole(self, shares: list[_Share]) -> tuple[Manifest, str]:
        place, task = self._shelf.place, self._task
        files = Files(place, self._aside)
        for share in shares:
            files.facts |= share.facts
        self._check_that_all_is_here(files.facts)
        Writer(files, self._aside).finish(task.metadata, [share.results for share in shares])
        manifest = Manifest(
            task.step, time.time(), len(shares), task.parts, version("phalanx"), torch.__version__, dict(files.facts)
        )
        files.write(MANIFEST, manifest.encode())
        _, final = place.names_for(task.step, task.token)
        place.publish(self._aside, final)
        return manifest, final

    def _check_that_all_is_here(self, facts: dict[str, Fact]) -> None:
        """Two nodes may have a directory of the same name that is not the same directory."""
        sizes = self._shelf.place.sizes(self._aside)
        for name, fact in facts.items():
            if sizes.get(name) != fact.bytes:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} is not whole: rank {self._council.rank} does not see {name} "
                    f"in {self._shelf.place}; give a path that is the same disk on all nodes."
                )

    def _clear_away(self) -> str:
        try:
            for name in list(self._shelf.leftovers(lambda name: self._task.token in name)):
                self._shelf.place.remove(name)
        except OSError as error:
            return f" What was written of it cannot be removed: {error}"
        return ""

    def _room(self) -> str:
        """For a full disk; known only when nothing of this save takes any more."""
        free = self._shelf.place.free_bytes()
        room = "" if free is None else f", and {in_bytes(free)} are free"
        return f" It needs {in_bytes(self._task.bytes)}{room}; make room there."

    def _tell(self, problem: str) -> None:
        if problem:
            self._note("save failed", step=self.step, problem=problem)
        self._council.tell(self._key("outcome"), problem)

    def _explain(self, error: Exception) -> str:
        head = f"rank {self._council.rank} could not write the checkpoint of step {self.step} to {self._shelf.place}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{head}: {_FULL}"
        if isinstance(error, OSError):
            return f"{head}: {error.strerror or error}."
        return f"{head}: {type(error).__name__}: {error}"


def _disagreement(shares: list[_Share]) -> str:
    """What keeps these from being one checkpoint; nothing if they are."""
    for share in shares:
        if share.error:
            return share.error
    first = shares[0]
    for rank, share in enumerate(shares):
        if share.step != first.step:
            return f"rank 0 saves step {first.step} and rank {rank} saves step {share.step}; save on all ranks alike."
        if share.digest != first.digest:
            return (
                f"at step {first.step} rank 0 and rank {rank} save different names, types or shapes; give save() the "
                "same parts on all ranks."
            )
    return ""
