"""One save: each rank writes its share beside training, and the rank that is done last makes the whole of it.

    rank 0 … n-1   copy what was left to copy, write rank-R.safetensors into step-N.tmp-TOKEN, sync it, hand in a record
    the last one   manifest.json, the rename to step-N; tells all; removes what is too old

Nobody waits here, so nobody can be waited for in a circle.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version

import torch

from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.checkpoint_text import say
from phalanx.checkpoint.copy_gate import CopyGate
from phalanx.checkpoint.sharding import Copies
from phalanx.checkpoint.storage.manifest import MANIFEST, Manifest, file_of
from phalanx.checkpoint.storage.records import Share, disagreement, merged
from phalanx.errors import CheckpointError
from phalanx.store.coordinator import Coordinator
from phalanx.system import in_decimal_bytes

_FULL = "the disk is full."


@dataclass(frozen=True)
class Task:
    """What is to be saved."""

    step: int
    number: int
    """The number of this save, counted by the checkpointer."""
    token: str
    parts: tuple[str, ...]
    share: Share
    """This rank's, as far as it is known before it is written. With an error, nothing is written."""
    keep: int | None
    bytes: int
    """Bytes of all tensors, on all ranks."""
    done_with: Sequence[str]
    """Keys of the store that no rank needs once all have come this far."""


class Background:
    """What the saves of one checkpointer have in common: the copies in memory, and a thread that lasts.

    To start a thread is to wait until it runs, which takes long where all cores are busy. It has no lower priority than
    training: whenever it holds the interpreter's lock, training would have to wait for it all the longer. An
    interpreter that ends waits for it.
    """

    def __init__(self) -> None:
        self.copies, self.gate = Copies(), CopyGate()
        self.thread = ThreadPoolExecutor(1, "checkpoint")

    def close(self) -> None:
        """Waits for what is under way."""
        self.thread.shutdown()
        self.gate.remove()


class Saving:
    """A save under way on this rank."""

    def __init__(
        self, task: Task, background: Background, coordinator: Coordinator, catalog: Catalog, note: Callable[..., None]
    ) -> None:
        self._task, self._background, self._coordinator = task, background, coordinator
        self._catalog, self._note = catalog, note
        self._aside, _ = catalog.place.names_for(task.step, task.token)
        self._started = time.monotonic()
        self._lost: BaseException | None = None
        self._done = threading.Event()

    @property
    def step(self) -> int:
        return self._task.step

    def start(self) -> None:
        background = self._background
        if not self._task.share.error:
            background.gate.shut()
        try:
            background.thread.submit(self._run)
        except BaseException:
            background.gate.open()
            raise

    def finish_own(self, timeout: float | None = None) -> bool:
        """Waits for this rank's part; whether it is done."""
        return self._done.wait(timeout)

    def finish(self, still: Callable[[float], None]) -> None:
        """Until all ranks are done; raises CheckpointError on all of them if there is no checkpoint then.

        ``still`` is called now and then with the seconds since the save began.
        """
        while not self.finish_own(timeout=10.0):
            still(time.monotonic() - self._started)
        if self._lost is not None:
            reason = str(self._lost) or type(self._lost).__name__
            raise CheckpointError(f"the checkpoint of step {self.step} could not be agreed on: {reason}")
        error = self._coordinator.await_value(
            self._key("outcome"), str, lambda: still(time.monotonic() - self._started)
        )
        if error:
            raise CheckpointError(error)

    def _key(self, what: str, before: int = 0) -> str:
        return f"save {self._task.number - before}/{what}"

    # ---- in the background

    def _run(self) -> None:
        try:
            if self._hand_in(self._write_share()):
                try:
                    problem = self._conclude()
                except Exception as error:  # noqa: BLE001  (whatever it is, all ranks are told)
                    problem = self._explain(error)
                self._tell(problem)
        except Exception as error:  # noqa: BLE001  (the store is gone; `finish` tells the training loop)
            self._lost = error
        finally:
            self._done.set()

    def _write_share(self) -> Share:
        share = self._task.share
        if share.error:
            return share
        try:
            try:
                self._background.copies.finish()
            finally:
                self._background.gate.open()
            place = self._catalog.place
            place.make(self._aside)
            fact = place.write(self._aside, file_of(self._coordinator.rank), self._background.copies.content)
        except Exception as error:  # noqa: BLE001  (whatever it is, all ranks are told)
            return share.failed(str(error) if isinstance(error, CheckpointError) else self._explain(error))
        return share.written(fact)

    def _hand_in(self, share: Share) -> bool:
        try:
            return self._coordinator.hand_in(self._key("share"), share.encode())
        except ValueError as error:  # JSON has no numbers of thousands of digits
            return self._coordinator.hand_in(self._key("share"), share.failed(self._explain(error)).encode())

    def _conclude(self) -> str:
        """The last rank: from shares to a checkpoint. Returns what went wrong."""
        handed_in = self._coordinator.collect(self._key("share"))
        self._coordinator.delete(self._key("outcome", before=1), *self._task.done_with)
        try:
            shares = [Share.decode(each, rank) for rank, each in enumerate(handed_in)]
            if problem := disagreement(shares):
                raise CheckpointError(problem)
            manifest, final = self._make_whole(shares)
        except Exception as error:  # noqa: BLE001  (whatever it is, all ranks are told)
            problem = str(error) if isinstance(error, CheckpointError) else self._explain(error)
            left = self._clear_away()
            return problem + (self._room() if problem.endswith(_FULL) else "") + left
        self._note("saved", step=self.step, seconds=time.monotonic() - self._started, bytes=manifest.bytes)
        try:
            self._catalog.prune(self._task.keep, final)
        except Exception as error:  # noqa: BLE001  (the checkpoint is there, and all ranks are told so)
            say(f"step {self.step} is saved, but an old checkpoint in {self._catalog.place} cannot be removed: {error}")
        return ""

    def _make_whole(self, shares: list[Share]) -> tuple[Manifest, str]:
        place, task = self._catalog.place, self._task
        self._check_that_all_is_here(shares)
        manifest = Manifest(
            task.step,
            time.time(),
            len(shares),
            task.parts,
            version("phalanx"),
            torch.__version__,
            {file_of(rank): share.fact for rank, share in enumerate(shares)},
            merged(shares),
            shares[0].values,
            [share.rng for share in shares],
        )
        place.write(self._aside, MANIFEST, manifest.encode())
        _, final = place.names_for(task.step, task.token)
        place.publish(self._aside, final)
        return manifest, final

    def _check_that_all_is_here(self, shares: list[Share]) -> None:
        """Two nodes may have a directory of the same name that is not the same directory."""
        sizes = self._catalog.place.sizes(self._aside)
        for rank, share in enumerate(shares):
            if sizes.get(file_of(rank)) != share.fact.bytes:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} is not whole: rank {self._coordinator.rank} does not see "
                    f"{file_of(rank)} in {self._catalog.place}; give a path that is the same disk on all nodes."
                )

    def _clear_away(self) -> str:
        try:
            for name in list(self._catalog.leftovers(lambda name: self._task.token in name)):
                self._catalog.place.remove(name)
        except OSError as error:
            return f" What was written of it cannot be removed: {error}"
        return ""

    def _room(self) -> str:
        """For a full disk; known only when nothing of this save takes any more."""
        free = self._catalog.place.free_bytes()
        room = "" if free is None else f", and {in_decimal_bytes(free)} are free"
        return f" It needs {in_decimal_bytes(self._task.bytes)}{room}; make room there."

    def _tell(self, problem: str) -> None:
        if problem:
            self._note("save failed", step=self.step, problem=problem)
        self._coordinator.publish(self._key("outcome"), problem)

    def _explain(self, error: Exception) -> str:
        head = (
            f"rank {self._coordinator.rank} could not write the checkpoint of step {self.step} to {self._catalog.place}"
        )
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{head}: {_FULL}"
        if isinstance(error, OSError):
            return f"{head}: {error.strerror or error}."
        return f"{head}: {type(error).__name__}: {error}"
