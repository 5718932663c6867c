"""`Checkpointer`: saves the state of a run while it trains, and loads the latest whole checkpoint."""

from __future__ import annotations

import itertools
import os
import re
import time
import uuid
from collections.abc import Callable

from torch import nn

from phalanx import attempt
from phalanx import world as worlds
from phalanx.argparser import whole_number
from phalanx.checkpoint import flatten, sharding
from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.load import CheckpointSelector
from phalanx.checkpoint.optimizers import OptimizerLike
from phalanx.checkpoint.reporting import log_event, print_line
from phalanx.checkpoint.save import Saving, Writer
from phalanx.checkpoint.schedule import Schedule
from phalanx.checkpoint.state import State, to_load, to_save
from phalanx.checkpoint.storage.base import open_storage
from phalanx.checkpoint.storage.manifest import MOST_STEPS, Share
from phalanx.checkpoint.storage.values import StateDict, Stateful
from phalanx.errors import CheckpointError, UsageError
from phalanx.preemption import stop_point
from phalanx.status import own_page
from phalanx.status.layout import CHECKPOINT
from phalanx.store import tcp_store
from phalanx.store.coordinator import Coordinator
from phalanx.world import World

_numbers = itertools.count()
"""Numbers of the checkpointers in this process: every rank makes the same ones in the same order."""
_REPORT_AFTER = 10.0
"""Seconds after which a wait for a save is reported."""


class Checkpointer:
    """Saves and loads the checkpoints of a run. All ranks make one, and call its methods alike.

    A save copies this rank's share of the state into memory, and writes it from there while training continues. The
    next save waits for the one before. A checkpoint is visible only when it is whole: killing any rank at any moment
    leaves the earlier ones as they were.

    Args:
        path: a directory that all ranks share, or a URL that fsspec understands, such as s3://bucket/run.
        keep: how many to keep; older ones are removed when a new one is whole. None keeps all.
        every: save() saves when a multiple of so many steps is reached, or when so much time has passed ("10min").
            By default, every call saves.
        save_on_stop: when a stop is requested (px.stop), save() saves whatever ``every`` says.
        asynchronous: False makes save() return only when the checkpoint is whole.
        trust: True pickles objects of any class in the state and loads them again, which runs code from the checkpoint.
        mode: the mode of new files, such as 0o640; whoever may read them may list their directory. By default only
            the owner may read them, unless the umask is one for a group (such as 0o027).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int | None = 3,
        every: int | str | None = None,
        *,
        save_on_stop: bool = True,
        asynchronous: bool = True,
        trust: bool = False,
        mode: int | None = None,
    ) -> None:
        if mode is not None and (type(mode) is not int or mode & ~0o777 or mode & 0o600 != 0o600):
            raise UsageError(f"mode={mode!r} is no mode of a file that its owner can read and write, such as 0o640.")
        self._catalog = Catalog(open_storage(path, mode))
        self._keep = None if keep is None else whole_number("keep", keep, 1)
        self._asynchronous, self._trust, self._save_on_stop = asynchronous, trust, save_on_stop
        self._coordinator = new_coordinator(worlds.current())
        self._schedule = Schedule(every, self._coordinator.lead)
        self._writer: Writer | None = None
        self._unlock: Callable[[], None] | None = None
        self._saving: Saving | None = None
        self._saves = 0
        self._last: int | None = None
        """The step that was saved or loaded last."""
        self._selector = CheckpointSelector(self._catalog, self._coordinator, trust)
        worlds.before_leaving(self.close)

    # ---- saving

    def save(
        self,
        step: int | State,
        *,
        model: nn.Module | None = None,
        optimizer: OptimizerLike | None = None,
        scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        extra: StateDict | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a `State`, or its parts, if that is due by ``every``; returns whether it was.

        An error of the save before is raised here, on all ranks. ``force`` saves in any case, at the end of a run.
        """
        state = to_save(step, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, extra=extra)
        whole_number("step", state.step, 0, MOST_STEPS - 1)
        if self._last is not None and state.step < self._last:
            raise UsageError(f"step {state.step} is to be saved after step {self._last}; steps count upwards.")
        force = force or (self._save_on_stop and stop_point.reason() is not None)
        if not force and not self._schedule.is_due(state.step):
            return False
        with own_page.phase(CHECKPOINT):
            self.wait()
            if force and self._saves and state.step == self._last:
                return False  # it is saved already
            self._begin(state)
            if not self._asynchronous:
                self.wait()
        return True

    def _begin(self, state: State) -> None:
        """Copies this rank's share and starts to write it.

        An error of this rank alone is sent to the others too, which raise it when they wait for this save.
        """
        coordinator, writer, started = self._coordinator, self._writer, time.perf_counter()
        if writer is None:
            writer = self._writer = Writer(coordinator, self._catalog, self._keep, self._prepare(state.step))
        failure: Exception | None = None
        try:
            flat = flatten.flatten(state, coordinator.rank, self._trust)
            tensors = flat.tensors
            rows = sharding.plan(tensors, coordinator.size)[coordinator.rank]
            rows += [sharding.whole(named) for named in tensors if named.kind == "own"]
            writer.buffer.take(rows)
            share = sharding.share_record(state.step, flat, rows, coordinator.rank)
        except Exception as error:  # noqa: BLE001  (all ranks report what a state_dict() raises)
            failure = _explained(error, coordinator.rank, state.step)
            if coordinator.size == 1:
                if not self._saves:
                    self._release()
                raise failure from error.__cause__ if failure is error else error
            tensors, share = [], Share(state.step, "", error=str(failure))
        seconds = time.perf_counter() - started
        log_event(coordinator.rank, "saving", step=state.step, seconds=seconds, bytes=writer.buffer.bytes)
        size = sum(named.tensor.nbytes for named in tensors)
        self._saving = Saving(writer, share, self._saves, state.parts, size, coordinator.used_keys())
        self._saves += 1
        self._last = state.step
        self._schedule.record(state.step)
        self._saving.start()
        if failure is not None and self._asynchronous:  # else save() waits for it, as on all ranks
            raise failure

    def _prepare(self, step: int) -> str:
        """Locks the storage and removes what earlier runs left unfinished, before the first save; returns the token."""

        def prepare() -> str:
            storage = self._catalog.storage
            try:
                self._unlock = storage.lock()
                self._check_order(step)
                for name in list(self._catalog.leftovers()):
                    storage.remove(name)
                    print_line(
                        f"removed {name} in {storage}: what an earlier run has left of a save that it did not finish"
                    )
            except OSError as error:
                self._release()
                raise CheckpointError(f"cannot write checkpoints to {storage}: {error.strerror or error}.") from None
            except UsageError:
                self._release()
                raise
            return uuid.uuid4().hex[:12]

        token = self._coordinator.lead(prepare, str)
        if not re.fullmatch("[0-9a-f]{12}", token):
            raise CheckpointError("the run's store does not hold what rank 0 has written there.")
        return token

    def _check_order(self, step: int) -> None:
        later = [entry.step for entry in self._catalog.whole() if entry.directory not in self._selector.broken]
        if later and later[0] > step:
            raise UsageError(
                f"{self._catalog.storage} has a checkpoint of step {later[0]}, and step {step} is to be saved: "
                "load_latest() would not find it. Load the latest first, give another path, or remove the later ones."
            )

    def wait(self) -> None:
        """Waits for the save under way, on all ranks; raises CheckpointError on all of them if it has failed."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        report_after = _REPORT_AFTER

        def report(seconds: float) -> None:
            nonlocal report_after
            if seconds >= report_after and self._coordinator.rank == 0:
                step = saving.step
                print_line(f"waiting for the checkpoint of step {step}, which has been written for {seconds:.0f} s")
                report_after *= 2

        saving.finish(report)

    def close(self) -> None:
        """Waits for the save under way. Leaving a ``with`` block does it, and leaving the world of px.init() too."""
        worlds.forget(self.close)
        attempt.resume_from(None)
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        if self._writer is not None:  # before unlocking: it may still write
            self._writer.close()
            self._writer = None
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # Every rank finishes its share, and the last one publishes the checkpoint. But other ranks may have failed
        # too, so this one does not wait for them.
        worlds.forget(self.close)
        if self._saving is not None:
            self._saving.finish_own()
        self._release()

    # ---- loading

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, oldest first, after the save under way. Their files are not read."""
        self.wait()
        return self._coordinator.lead(lambda: sorted(entry.step for entry in self._catalog.whole()), list[int])

    def load_latest(
        self,
        state: State | None = None,
        *,
        model: nn.Module | None = None,
        optimizer: OptimizerLike | None = None,
        scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        extra: StateDict | None = None,
    ) -> State | None:
        """Loads the newest whole checkpoint into the state, and returns it; None if there is none.

        Damaged ones are skipped, and the reason is printed.
        """
        target = to_load(state, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, extra=extra)
        self.wait()
        return self._record_load(target) if self._selector.load_latest(target) else None

    def load(
        self,
        step: int,
        state: State | None = None,
        *,
        model: nn.Module | None = None,
        optimizer: OptimizerLike | None = None,
        scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        extra: StateDict | None = None,
    ) -> State:
        """Loads the checkpoint of one step; CheckpointError if it is not there, or damaged."""
        target = to_load(state, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, extra=extra)
        step = whole_number("step", step)
        self.wait()
        self._selector.load(step, target)
        return self._record_load(target)

    def _record_load(self, state: State) -> State:
        self._last = state.step
        self._schedule.record(state.step)
        return state


def _explained(error: Exception, rank: int, step: int) -> Exception:
    if isinstance(error, UsageError | CheckpointError):
        return error
    explained = CheckpointError(f"rank {rank} could not take the state of step {step}: {type(error).__name__}: {error}")
    explained.__cause__ = error
    return explained


def new_coordinator(world: World) -> Coordinator:
    """Returns a coordinator of all ranks for one checkpointer, with a part of the store of its own."""
    from torch.distributed import PrefixStore

    shared = world.store if world.store is not None else tcp_store.private()
    store = PrefixStore(f"phalanx/checkpoint-{next(_numbers)}", shared)
    return Coordinator(store, world.rank, world.size, world.claims, "a checkpoint was being agreed on", CheckpointError)
