"""`px.track`: like tqdm around a loader. Sets the epoch, counts what the loop was given, times it, and shows it."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from phalanx import argparser
from phalanx import world as worlds
from phalanx.comm import clock
from phalanx.errors import UsageError
from phalanx.events import EventLog, rank_events_path
from phalanx.status import layout, own_page
from phalanx.status.page import StatusPage
from phalanx.torch_compat.tensors import tree_map_only
from phalanx.train import log
from phalanx.train.progress import Board, Line, Report, describe

_T = TypeVar("_T")
_LIVE_EVERY, _PLAIN_EVERY, _REPORT_EVERY = 0.5, 10.0, 1.0

_running: list[Track[Any]] = []
_epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The last epoch of each loader that was tracked without a number."""


def track(
    loader: Iterable[_T], epoch: int | None = None, *, device: str | torch.device | None = None, quiet: bool = False
) -> Track[_T]:
    """Iterates over a loader, and knows how the run is getting on.

        for epoch in range(epochs):
            for x, y in px.track(loader, epoch=epoch):
                ...
                px.log(loss=loss)

    The loader's sampler is told the epoch (`set_epoch`), and what the loop has been given, so that its state is right
    at any moment, whatever the loader has fetched ahead. Rank zero shows one line with the pace of all ranks; every
    rank writes its pace to the run directory of ``phalanx run``.

    Args:
        loader: a DataLoader, or anything that can be iterated over.
        epoch: its number; left out, the passes over this loader are counted.
        device: where the tensors of each batch are moved to, if anywhere.
        quiet: show no line.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise UsageError(f"loader is {argparser.shown(loader)}; give a DataLoader, or something else to iterate over.")
    place = argparser.device(device) if device is not None else None
    return Track(loader, None if epoch is None else argparser.whole_number("epoch", epoch), place, quiet)


class Track(Generic[_T]):
    """One pass over a loader."""

    def __init__(self, loader: Iterable[_T], epoch: int | None, device: torch.device | None, quiet: bool) -> None:
        self._loader, self._device, self._quiet = loader, device, quiet
        self._sampler = _sampler_of(loader)
        self.epoch = _next_epoch(loader, self._sampler) if epoch is None else epoch
        self.batches_left: int | None = None
        """With the one that the loop holds now; None when the loader has no length."""

    def __len__(self) -> int:
        total = _batches(self._loader)
        if total is None:
            raise TypeError(f"this {type(self._loader).__name__} has no len()")
        return total

    def __iter__(self) -> Iterator[_T]:
        worlds.diverge()
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        total = _batches(self._loader)
        watch = _Watch(self.epoch, total, self._quiet)
        sizes = _batch_sizes(self._loader, self._sampler)
        self.batches_left = None if total is None else total + 1
        _running.append(self)
        try:
            for batch in watch.timed(self._loader):
                count = next(sizes, None) if sizes is not None else None
                count = _length(batch) if count is None else count
                if hasattr(self._sampler, "received"):
                    self._sampler.received(count)
                if self.batches_left is not None:
                    self.batches_left -= 1
                watch.given(count)
                yield batch if self._device is None else _moved(batch, self._device)
            watch.end()
        finally:
            _running.remove(self)
            watch.close()


def batches_left() -> int | None:
    """Of the innermost loop that is being tracked; None when there is none, or it does not know."""
    return _running[-1].batches_left if _running else None


class _Watch:
    """The times of one pass, told to whom it concerns."""

    def __init__(self, epoch: int, total: int | None, quiet: bool) -> None:
        self._world = worlds.current()
        self._total = total
        self._report = Report(epoch)
        self._board = Board(self._world, next(_numbers))
        self._line = Line() if self._world.is_main and not quiet else None
        self._events, self._page = _run_files(self._world.rank)
        now = time.perf_counter()
        self._started = self._asked = now
        self._show_at = self._report_at = now + _LIVE_EVERY
        self._communication_before = clock.seconds()

    def timed(self, loader: Iterable[_T]) -> Iterator[_T]:
        """The loader's batches; what it takes to get one counts as waiting for data."""
        self._beat(layout.DATA)
        batches = iter(loader)
        while True:
            self._asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            self._beat(layout.DATA)
            if time.perf_counter() >= self._report_at:
                self._tell()

    def given(self, count: int) -> None:
        report = self._report
        report.data += time.perf_counter() - self._asked
        report.step += 1
        report.samples += count
        self._beat(layout.FORWARD)

    def end(self) -> None:
        self._report.ended = True
        self._beat(layout.OTHER)
        self._tell()

    def close(self) -> None:
        """Also when the loop was left early: a line that stands there unfinished gets its end."""
        if self._line is not None and self._line.is_open:
            self._line.finish(describe(self._board.read(self._report), self._report, self._total))
        if self._events is not None:
            self._events.close()

    def _beat(self, phase: int) -> None:
        if self._page is not None:
            report = self._report
            self._page.beat(phase, report.epoch, report.step, report.samples)

    def _tell(self) -> None:
        now = time.perf_counter()
        report = self._report
        report.seconds = now - self._started
        before, after = self._communication_before, clock.seconds()
        report.communication = after - before if before is not None and after is not None else None
        report.logged = log.take() or report.logged
        self._report_at = now + _REPORT_EVERY
        self._board.publish(report)
        if self._events is not None:
            means = {name: total / count for name, (total, count) in report.logged.items()}
            self._events.write("epoch" if report.ended else "progress", **_fields(report), values=means)
        is_empty = self._total == 0  # a run that goes on from the end of an epoch
        if self._line is not None and not is_empty and (report.ended or now >= self._show_at):
            self._show(self._line, now)

    def _show(self, line: Line, now: float) -> None:
        if self._report.ended:
            self._board.await_ends()
        text = describe(self._board.read(self._report), self._report, self._total)
        if self._report.ended:
            line.finish(text)
        else:
            line.show(text)
        self._show_at = now + (_LIVE_EVERY if line.is_live else _PLAIN_EVERY)


def _fields(report: Report) -> dict[str, Any]:
    fields = {name: getattr(report, name) for name in ("epoch", "step", "samples", "seconds", "data", "communication")}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}


_numbers = itertools.count()
"""Of the passes in this process: every rank makes the same ones in the same order, so a number names one for all."""


def _run_files(rank: int) -> tuple[EventLog | None, StatusPage | None]:
    """The event log and the status page of this rank, if ``phalanx run`` has made a place for them."""
    directory = os.environ.get("PHALANX_RUN_DIR")
    if not directory or not Path(directory).is_dir():
        return None, None
    return EventLog(rank_events_path(Path(directory), rank)), own_page.current()


def _batches(loader: Any) -> int | None:
    """How many there are, if that can be known: a DataLoader over an iterable dataset has a len() that raises."""
    try:
        return len(loader)
    except TypeError:
        return None


def _sampler_of(loader: Any) -> Any:
    """What draws the indices of a DataLoader: its sampler, or the one inside its batch sampler."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(owner, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            return sampler
    batch_sampler = getattr(loader, "batch_sampler", None)
    return batch_sampler if hasattr(batch_sampler, "set_epoch") else None


def _next_epoch(loader: Any, sampler: Any) -> int:
    """The first pass goes on where the sampler stands; each further one is the next epoch."""
    try:
        before = _epochs.get(loader)
        epoch = getattr(sampler, "epoch", 0) if before is None else before + 1
        _epochs[loader] = epoch
        return epoch
    except TypeError:  # a list, say: it cannot be remembered, and has no epochs
        return 0


def _batch_sizes(loader: Any, sampler: Any) -> Iterator[int] | None:
    """How many samples each batch of a DataLoader takes from its sampler; None when only the batches can tell."""
    size = getattr(loader, "batch_size", None)
    if size is None or sampler is None or not isinstance(sampler, Sized):
        return None
    whole, rest = divmod(len(sampler), size)
    return itertools.chain(itertools.repeat(size, whole), [rest] if rest else [])


def _length(batch: Any) -> int:
    """The samples in a batch: the first dimension of its first tensor, as far in as that may be."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)) and batch:
        return _length(batch[0]) if isinstance(batch[0], (Tensor, Mapping, list, tuple)) else len(batch)
    return 1


def _moved(batch: _T, device: torch.device) -> _T:
    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return tree_map_only(Tensor, move, batch)
