"""`Checkpointer`: saves the state of a run beside training, and finds the latest whole one again."""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any

from phalanx import attempt
from phalanx import world as worlds
from phalanx.argparser import whole_number
from phalanx.checkpoint import flatten, schedule, sharding
from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.checkpoint_text import note, say
from phalanx.checkpoint.save import Background, Saving, Task
from phalanx.checkpoint.select import CheckpointSelector
from phalanx.checkpoint.sharding import share_of
from phalanx.checkpoint.state import State, to_load, to_save
from phalanx.checkpoint.storage.base import open_storage
from phalanx.checkpoint.storage.manifest import MOST_STEPS
from phalanx.checkpoint.storage.records import Share
from phalanx.errors import CheckpointError, UsageError
from phalanx.status import own_page
from phalanx.status.layout import CHECKPOINT
from phalanx.store import tcp_store
from phalanx.store.coordinator import Coordinator
from phalanx.world import World

_PATIENCE = 10.0
_numbers = itertools.count()
"""Numbers of the checkpointers in this process: every rank makes the same ones in the same order."""


class Checkpointer:
    """Keeps the checkpoints of a run. All ranks make one, and call its methods alike.

    A save copies this rank's share of the state into memory, and writes it from there while training goes on. The next
    save waits for the one before. A checkpoint is there only when it is whole: killing any rank at any moment leaves
    the ones before as they were.

    Args:
        path: a directory that all ranks share, or a URL that fsspec understands, such as s3://bucket/run.
        keep: how many to keep; older ones are removed when a new one is whole. None keeps all.
        every: save() saves when a multiple of so many steps is reached, or when so much time has passed ("10min").
            Left out, every call saves.
        asynchronous: False makes save() return only when the checkpoint is whole.
        trust: True pickles objects of any class in the state, loads them again, and loads checkpoints of the form that
            was written before. Loading then runs code from the checkpoint.
        mode: of new files, such as 0o640; directories get it too, with the right to enter where there is one to read.
            Left out, only the owner may read them, unless the umask is one for a group (such as 0o027).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int | None = 3,
        every: int | str | None = None,
        *,
        asynchronous: bool = True,
        trust: bool = False,
        mode: int | None = None,
    ) -> None:
        if mode is not None and (type(mode) is not int or mode & ~0o777 or mode & 0o600 != 0o600):
            raise UsageError(f"mode={mode!r} is no mode of a file that its owner can read and write, such as 0o640.")
        self._catalog = Catalog(open_storage(path, mode))
        self._keep = None if keep is None else whole_number("keep", keep, 1)
        self._asynchronous, self._trust = asynchronous, trust
        self._coordinator = new_coordinator(worlds.current())
        self._schedule = schedule.parse(every, self._coordinator.lead)
        self._note = functools.partial(note, self._coordinator.rank)
        self._background: Background | None = None
        self._token: str | None = None
        """Of this run's saves; known once the first begins."""
        self._unlock: Callable[[], None] | None = None
        self._saving: Saving | None = None
        self._saves = 0
        self._last: int | None = None
        """The step that was saved or loaded last."""
        self._finder = CheckpointSelector(self._catalog, self._coordinator, self._note, trust)
        worlds.before_leaving(self.close)

    # ---- saving

    def save(
        self,
        step: int | State,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        extra: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a `State`, or what such a one is made of; whether it was time to, by ``every``.

        An error of the save before is raised here, on all ranks. ``force`` saves in any case, at the end of a run.
        """
        state = to_save(step, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, extra=extra)
        whole_number("step", state.step, 0, MOST_STEPS - 1)
        if self._last is not None and state.step < self._last:
            raise UsageError(f"step {state.step} is to be saved after step {self._last}; steps count upwards.")
        if not force and not self._schedule.is_due(state.step):
            return False
        with own_page.phase(CHECKPOINT):
            self.wait()
            if force and self._saves and state.step == self._last:
                return False  # it is there already
            self._begin(state)
            if not self._asynchronous:
                self.wait()
        return True

    def _begin(self, state: State) -> None:
        """An error of this rank alone is told to the others too, which raise it when they wait for this save."""
        coordinator = self._coordinator
        started = time.perf_counter()
        if self._token is None:
            self._token = self._open(state.step)
        background = self._background = self._background or Background()
        failure: Exception | None = None
        try:
            flat = flatten.flatten(state, coordinator.rank, self._trust)
            pieces = flat.pieces
            parts = sharding.plan(pieces, coordinator.size)[coordinator.rank]
            parts += [sharding.whole(piece) for piece in pieces if piece.kind == "own"]
            background.copies.take(parts)
            share = share_of(state.step, flat, parts, coordinator.rank)
        except Exception as error:  # noqa: BLE001  (whatever a state_dict() raises, all ranks are told)
            failure = _explained(error, coordinator.rank, state.step)
            if coordinator.size == 1:
                if not self._saves:
                    self._release()
                raise failure from error.__cause__ if failure is error else error
            pieces, share = [], Share(state.step, "", error=str(failure))
        size = sum(piece.tensor.nbytes for piece in pieces)
        task = Task(state.step, self._saves, self._token, state.parts, share, self._keep, size, coordinator.used_keys())
        self._note("saving", step=state.step, seconds=time.perf_counter() - started, bytes=background.copies.bytes)
        self._saving = Saving(task, background, coordinator, self._catalog, self._note)
        self._saves += 1
        self._last = state.step
        self._schedule.done(state.step)
        self._saving.start()
        if failure is not None and self._asynchronous:  # else save() waits for it, as on all ranks
            raise failure

    def _open(self, step: int) -> str:
        """Before the first save: nobody else writes here, and nothing is left of those that did."""

        def prepare() -> str:
            place = self._catalog.place
            try:
                self._unlock = place.lock()
                self._check_order(step)
                for name in list(self._catalog.leftovers(lambda _: True)):
                    place.remove(name)
                    say(f"removed {name} in {place}: what an earlier run has left of a save that it did not finish")
            except OSError as error:
                self._release()
                raise CheckpointError(f"cannot write checkpoints to {place}: {error.strerror or error}.") from None
            except UsageError:
                self._release()
                raise
            return uuid.uuid4().hex[:12]

        token = self._coordinator.lead(prepare, str)
        if not re.fullmatch("[0-9a-f]{12}", token):
            raise CheckpointError("the run's store does not hold what rank 0 has written there.")
        return token

    def _check_order(self, step: int) -> None:
        later = [entry.step for entry in self._catalog.whole() if entry.directory not in self._finder.broken]
        if later and later[0] > step:
            raise UsageError(
                f"{self._catalog.place} has a checkpoint of step {later[0]}, and step {step} is to be saved: "
                "load_latest() would not find it. Load the latest first, give another path, or remove the later ones."
            )

    def wait(self) -> None:
        """Until the save under way is whole on all ranks; raises its error on all of them, CheckpointError."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        said = _PATIENCE

        def still(seconds: float) -> None:
            nonlocal said
            if seconds >= said and self._coordinator.rank == 0:
                say(f"waiting for the checkpoint of step {saving.step}, which has been written for {seconds:.0f} s")
                said *= 2

        saving.finish(still)

    def close(self) -> None:
        """Waits for the save under way. Leaving a ``with`` block does it, and leaving the world of px.init() too."""
        worlds.forget(self.close)
        attempt.resume_from(None)
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        if self._background is not None:  # first: while it writes, nobody else may
            self._background.close()
            self._background = None
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()
        self._token = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # This rank's share is written, and the others' are: whoever is last makes a checkpoint of them. But other ranks
        # may have failed too, so nobody is waited for.
        worlds.forget(self.close)
        if self._saving is not None:
            self._saving.finish_own()
        self._release()

    # ---- loading

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, oldest first, after the save under way. Their files are not read."""
        self.wait()
        return self._coordinator.lead(lambda: sorted(entry.step for entry in self._catalog.whole()), list[int])

    def load_latest(
        self,
        state: State | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> State | None:
        """Loads the newest whole checkpoint into the state, and returns it; None if there is none.

        Damaged ones are skipped, with a line that says why.
        """
        target = to_load(state, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, extra=extra)
        self.wait()
        return self._took(target) if self._finder.load_latest(target) else None

    def load(
        self,
        step: int,
        state: State | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> State:
        """Loads the checkpoint of one step; CheckpointError if it is not there, or damaged."""
        target = to_load(state, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, extra=extra)
        step = whole_number("step", step)
        self.wait()
        self._finder.load(step, target)
        return self._took(target)

    def _took(self, state: State) -> State:
        self._last = state.step
        self._schedule.done(state.step)
        return state


def _explained(error: Exception, rank: int, step: int) -> Exception:
    if isinstance(error, UsageError | CheckpointError):
        return error
    told = CheckpointError(f"rank {rank} could not take the state of step {step}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def new_coordinator(world: World) -> Coordinator:
    """Returns a coordinator of all ranks for one checkpointer, with a part of the store of its own."""
    from torch.distributed import PrefixStore

    shared = world.store if world.store is not None else tcp_store.private()
    store = PrefixStore(f"phalanx/checkpoint-{next(_numbers)}", shared)
    return Coordinator(store, world.rank, world.size, world.claims, "a checkpoint was being agreed on", CheckpointError)
