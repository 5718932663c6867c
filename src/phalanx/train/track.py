"""`px.track`: like tqdm around a loader. Sets the epoch, counts and times the batches, and shows the progress."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from phalanx import argparser
from phalanx import world as worlds
from phalanx.comm.order import seconds_in_collectives
from phalanx.devices import accelerator
from phalanx.errors import UsageError
from phalanx.events import rank_events_path
from phalanx.preemption.stop import stop
from phalanx.run_files import EventLog
from phalanx.status import layout, notices, own_page
from phalanx.torch_compat.tensors import tree_map_where
from phalanx.train.progress import ProgressExchange, ProgressLine, RankProgress, describe, take_logged

_T = TypeVar("_T")
_LIVE_EVERY, _PLAIN_EVERY, _REPORT_EVERY = 0.5, 10.0, 1.0

_running: list[Track[Any]] = []
_epochs: weakref.WeakKeyDictionary[Iterable[object], int] = weakref.WeakKeyDictionary()
"""The last epoch of each loader that was tracked without a number."""
_passes = itertools.count()
"""Numbers of the passes in this process: every rank makes the same ones in the same order."""


def track(
    loader: Iterable[_T], epoch: int | None = None, *, device: str | torch.device | None = None, quiet: bool = False
) -> Track[_T]:
    """Iterates over a loader, and shows the progress of the run.

        for epoch in range(epochs):
            for x, y in px.track(loader, epoch=epoch):
                ...
                px.log(loss=loss)

    It calls the sampler's `set_epoch`, and its `received` with every batch, so that the sampler's state is right at any
    moment, however far ahead the loader fetches. Rank zero shows one line with the pace of all ranks; every rank writes
    its pace to the run directory of ``phalanx run``.

    Args:
        loader: a DataLoader, or anything that can be iterated over.
        epoch: its number; by default the passes over this loader are counted.
        device: where the tensors of each batch are moved to, if anywhere, and whatever else has a method ``to``. On a
            GPU they are copied on a stream of their own, beside the kernels of the steps before.
        quiet: show no line.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise UsageError(f"loader is {argparser.shown(loader)}; give a DataLoader, or something else to iterate over.")
    target = argparser.device(device) if device is not None else None
    return Track(loader, None if epoch is None else argparser.whole_number("epoch", epoch), target, quiet)


class Track(Generic[_T]):
    """One pass over a loader."""

    def __init__(self, loader: Iterable[_T], epoch: int | None, device: torch.device | None, quiet: bool) -> None:
        self._loader, self._device, self._quiet = loader, device, quiet
        self._sampler = _sampler_of(loader)
        self.epoch = _next_epoch(loader, self._sampler) if epoch is None else epoch
        self.batches_left: int | None = None
        """The number of batches left, the current one included; None if the loader has no length."""

    def __len__(self) -> int:
        total = _batches(self._loader)
        if total is None:
            raise TypeError(f"this {type(self._loader).__name__} has no len()")
        return total

    def __iter__(self) -> Iterator[_T]:
        if stop.requested:  # the epochs that are left have no batches
            return
        worlds.diverge()
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        total = _batches(self._loader)
        reporter = _Reporter(self.epoch, total, self._quiet)
        sizes = _batch_sizes(self._loader, self._sampler)
        copy = _BatchCopy(self._device, self._loader) if self._device is not None else None
        self.batches_left = None if total is None else total + 1
        _running.append(self)
        try:
            for batch in reporter.timed(self._loader):
                count = next(sizes, None) if sizes is not None else None
                count = _length(batch) if count is None else count
                if hasattr(self._sampler, "received"):
                    self._sampler.received(count)
                if self.batches_left is not None:
                    self.batches_left -= 1
                reporter.add_batch(count)
                yield batch if copy is None else copy(batch)
                if stop.requested:
                    break
            reporter.end()
        finally:
            _running.remove(self)
            reporter.close()


def batches_left() -> int | None:
    """Returns the number for the innermost loop that is being tracked; None if there is none, or it is unknown."""
    return _running[-1].batches_left if _running else None


class _BatchCopy:
    """Moves the batches of one pass.

    The host runs ahead of an accelerator. A copy on a stream of its own does not wait for the kernels that are queued,
    and those of this step wait for the copy. No batch is fetched early: the state of a loader would be ahead, too.
    """

    def __init__(self, device: torch.device, loader: object) -> None:
        self._device, self._stream = device, accelerator.copy_stream(device)
        if self._stream is not None and getattr(loader, "pin_memory", None) is False:
            notices.give("batches are copied from memory that is not pinned; DataLoader(…, pin_memory=True) is faster.")

    def __call__(self, batch: _T) -> _T:
        """Moves tensors, and what takes its own along: encodings of transformers, graphs, packed sequences."""
        moved = tree_map_where(lambda value: callable(getattr(value, "to", None)), self._move, batch)
        if self._stream is not None:
            accelerator.module(self._device).current_stream(self._device).wait_stream(self._stream)
        return moved

    def _move(self, value: Any) -> object:
        is_plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
        if self._stream is not None and is_plain and value.device.type == "cpu":
            with accelerator.module(self._device).stream(self._stream):
                tensor = value.to(self._device, non_blocking=True)
            # The memory belongs to the copying stream, which must not reuse it while the kernels read it.
            tensor.record_stream(accelerator.module(self._device).current_stream(self._device))
            return tensor
        try:
            return value.to(self._device, non_blocking=True)
        except TypeError:  # a `to` that somebody has written
            return value.to(self._device)


class _Reporter:
    """Times one pass, and reports it to the line, the other ranks, the event file and the status page."""

    def __init__(self, epoch: int, total: int | None, quiet: bool) -> None:
        world = worlds.current()
        self._total = total
        self._progress = RankProgress(epoch)
        self._exchange = ProgressExchange(world, next(_passes))
        self._line = ProgressLine() if world.is_main and not quiet else None
        directory = os.environ.get("PHALANX_RUN_DIR")
        is_recorded = directory and Path(directory).is_dir()
        self._events = EventLog(rank_events_path(Path(directory), world.rank)) if directory and is_recorded else None
        self._page = own_page.current() if is_recorded else None
        now = time.perf_counter()
        self._started = self._requested = now
        self._show_at = self._report_at = now + _LIVE_EVERY
        self._communication_before = seconds_in_collectives()

    def timed(self, loader: Iterable[_T]) -> Iterator[_T]:
        """Yields the loader's batches; the time to get one counts as waiting for data."""
        self._beat(layout.DATA)
        batches = iter(loader)
        while True:
            self._requested = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            self._beat(layout.DATA)
            if time.perf_counter() >= self._report_at:
                self._report()

    def add_batch(self, samples: int) -> None:
        progress = self._progress
        progress.data += time.perf_counter() - self._requested
        progress.step += 1
        progress.samples += samples
        self._beat(layout.FORWARD)

    def end(self) -> None:
        self._progress.ended = True
        self._beat(layout.OTHER)
        self._report()

    def close(self) -> None:
        """Ends the line, also if the loop was left early."""
        if self._line is not None and self._line.is_open:
            self._line.finish(self._describe())
        if self._events is not None:
            self._events.close()

    def _beat(self, phase: int) -> None:
        if self._page is not None:
            progress = self._progress
            self._page.beat(phase, progress.epoch, progress.step, progress.samples)

    def _report(self) -> None:
        now = time.perf_counter()
        progress = self._progress
        progress.seconds = now - self._started
        before, after = self._communication_before, seconds_in_collectives()
        progress.communication = after - before if before is not None and after is not None else None
        progress.logged = take_logged() or progress.logged
        self._report_at = now + _REPORT_EVERY
        self._exchange.publish(progress)
        if self._events is not None:
            means = {name: total / count for name, (total, count) in progress.logged.items()}
            self._events.write("epoch" if progress.ended else "progress", **_fields(progress), values=means)
        is_empty = self._total == 0  # a run that resumes at the end of an epoch
        if self._line is not None and not is_empty and (progress.ended or now >= self._show_at):
            self._show(self._line, now)

    def _show(self, line: ProgressLine, now: float) -> None:
        if self._progress.ended:
            self._exchange.await_ends()
        show = line.finish if self._progress.ended else line.show
        show(self._describe())
        self._show_at = now + (_LIVE_EVERY if line.is_live else _PLAIN_EVERY)

    def _describe(self) -> str:
        return describe(self._exchange.read(self._progress), self._progress, self._total)


def _fields(progress: RankProgress) -> dict[str, object]:
    fields = {name: value for name, value in asdict(progress).items() if name not in ("logged", "ended")}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}


def _batches(loader: object) -> int | None:
    """Returns the number of batches, if it is known: a DataLoader over an iterable dataset has a len() that raises."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


def _sampler_of(loader: object) -> Any:
    """Returns what draws the indices of a DataLoader: its sampler, or the one inside its batch sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler)
    return next((each for each in found if hasattr(each, "set_epoch")), None)


def _next_epoch(loader: Iterable[object], sampler: object) -> int:
    """The first pass resumes the sampler's epoch; each further one is the next epoch."""
    try:
        before = _epochs.get(loader)
        epoch = getattr(sampler, "epoch", 0) if before is None else before + 1
        _epochs[loader] = epoch
        return epoch
    except TypeError:  # a list, say: it cannot be remembered, and has no epochs
        return 0


def _batch_sizes(loader: object, sampler: object) -> Iterator[int] | None:
    """Yields how many samples each batch of a DataLoader takes from its sampler; None if only the batches show it."""
    size = getattr(loader, "batch_size", None)
    if size is None or not isinstance(sampler, Sized):
        return None
    whole, rest = divmod(len(sampler), size)
    return itertools.chain(itertools.repeat(size, whole), [rest] if rest else [])


def _length(batch: object) -> int:
    """Returns the number of samples in a batch: the first dimension of its first tensor, however deep it is nested."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return _length(batch[0]) if isinstance(batch[0], Tensor | Mapping | list | tuple) else len(batch)
    return 1
