"""The progress of all ranks: the values that they log, how they exchange it, and the line that rank zero prints.

Once a second each rank publishes its progress in the store that all ranks share. There is no collective, so no rank
waits for another, and a rank that leaves its loop early disturbs no other.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field, replace
from statistics import mean

import torch.distributed as dist
from torch import Tensor

from phalanx import attempt, messages
from phalanx.errors import ForeignData, UsageError
from phalanx.world import World

_WORTH_SHOWING = 0.1
"""The share by which the slowest rank must be slower; less is noise."""
_END_TIMEOUT, _POLL_EVERY = 0.5, 0.005
"""Seconds that rank zero waits for the last progress of the others at the end of an epoch."""

Value = float | int | Tensor
Sums = dict[str, tuple[float, int]]
"""The sum of the values of each name, and their number."""
_logged: dict[str, tuple[Value, int]] = {}


def log(**values: Value) -> None:
    """Adds values to the progress line of `px.track` and to the run's events.

    They are averaged when they are shown, over time and over the ranks; until then nothing is exchanged, and no value
    is fetched from a GPU.
    """
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UsageError(f"px.log({name}=…) got a tensor of shape {tuple(value.shape)}; log its mean.")
            value = value.detach()  # noqa: PLW2901
        elif not isinstance(value, int | float):
            raise UsageError(f"px.log({name}={value!r}) is not a number.")
        total, count = _logged.get(name, (0.0, 0))
        _logged[name] = total + value, count + 1


def take_logged() -> Sums:
    """Returns what was logged since the last call; on a GPU this waits for the values."""
    taken = dict(_logged)
    _logged.clear()
    return {name: (float(total), count) for name, (total, count) in taken.items()}


@dataclass
class RankProgress:
    """The progress of one rank in an epoch."""

    epoch: int
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Seconds since the first batch of the epoch was requested; the following ones are part of them."""
    data: float = 0.0
    """Seconds of waiting for the loader."""
    communication: float | None = None
    """Seconds in collectives, which may overlap with computing; None if the backend does not measure them."""
    logged: Sums = field(default_factory=dict)
    ended: bool = False

    @property
    def busy(self) -> float:
        """Seconds of a step in which this rank did not wait for others."""
        return (self.seconds - (self.communication or 0.0)) / max(1, self.step)


class ProgressExchange:
    """Publishes the latest progress of this rank in the store, and reads that of the others.

    A lost store is no reason to stop training, which may not need it: from then on nothing is exchanged.
    """

    def __init__(self, world: World, number: int) -> None:
        """``number`` is that of the pass over a loader, the same on all ranks."""
        self._store = world.store if world.size > 1 else None
        self._world, self._number = world, number

    def publish(self, own: RankProgress) -> None:
        if self._store is None:
            return
        try:
            self._store.set(self._key(self._world.rank), _encode(self._number, own).decode())
            if own.ended and not self._world.is_main:
                self._store.set(self._end_key(self._world.rank), "yes")
        except dist.DistError:
            self._store = None

    def read(self, own: RankProgress) -> dict[int, RankProgress]:
        """Returns the progress of all ranks that are in the same pass."""
        found = {self._world.rank: own}
        if self._store is None:
            return found
        try:
            for rank in range(self._world.size):
                if rank != self._world.rank and self._store.check([self._key(rank)]):
                    data = self._store.get(self._key(rank))
                    with contextlib.suppress(ForeignData, ValueError):  # a line about progress never stops training
                        number, progress = _decode(data)
                        if number == self._number:
                            found[rank] = progress
        except dist.DistError:
            self._store = None
        return found

    def await_ends(self) -> None:
        """Waits a moment on rank zero for the others to end the epoch too."""
        if self._store is None:
            return
        deadline = time.monotonic() + _END_TIMEOUT
        others = [self._end_key(rank) for rank in range(1, self._world.size)]
        try:
            # The store's own wait prints two lines of warnings when a rank is late.
            while not self._store.check(others):
                if time.monotonic() > deadline:
                    return  # it has left its loop, or is late: its latest progress is shown
                time.sleep(_POLL_EVERY)
            for key in others:
                self._store.delete_key(key)
        except dist.DistError:
            self._store = None

    def _key(self, rank: int) -> str:
        return f"phalanx/track/{rank}"

    def _end_key(self, rank: int) -> str:
        return f"phalanx/track/{rank}/end of {self._number}"


def _encode(number: int, progress: RankProgress) -> bytes:
    """Sums are encoded as text: JSON has no NaN and no infinity."""
    sums = {name: (repr(total), count) for name, (total, count) in progress.logged.items()}
    return messages.encode((number, replace(progress, logged={}), sums))


def _decode(data: bytes) -> tuple[int, RankProgress]:
    shape = tuple[int, RankProgress, dict[str, tuple[str, int]]]
    number, progress, sums = messages.decode(data, shape, "the store of the run")
    progress.logged = {name: (float(total), count) for name, (total, count) in sums.items()}
    return number, progress


def describe(ranks: dict[int, RankProgress], own: RankProgress, total: int | None) -> str:
    """Returns ``epoch 2, step 120/400, 5312 samples/s, loss 0.1234, 12 s left, slowest rank 3 (+8 %)``

    In a run that was interrupted it begins with ``attempt 2 from step 70``.
    """
    parts = [
        *filter(None, [attempt.describe()]),
        f"epoch {own.epoch}",
        f"step {own.step}" + (f"/{total}" if total is not None else ""),
    ]
    rates = [rank.samples / rank.seconds for rank in ranks.values() if rank.seconds > 0]
    parts.append(f"{_short(sum(rates))} samples/s")
    parts += [f"{name} {value:.4g}" for name, value in averages(ranks).items()]
    if total is not None and own.step and not own.ended:
        parts.append(f"{_time(own.seconds / own.step * (total - own.step))} left")
    elif own.ended:
        parts.append(_time(own.seconds))
    if own.seconds > 0 and own.data / own.seconds >= 0.05:
        parts.append(f"data {own.data / own.seconds:.0%}")
    return ", ".join([*parts, *_slowest(ranks)])


def averages(ranks: dict[int, RankProgress]) -> dict[str, float]:
    """Returns the means over the ranks of the values that each has logged since its last report."""
    means: dict[str, list[float]] = {}
    for rank in ranks.values():
        for name, (total, count) in rank.logged.items():
            means.setdefault(name, []).append(total / count)
    return {name: mean(values) for name, values in means.items()}


def _slowest(ranks: dict[int, RankProgress]) -> list[str]:
    """Names the rank that the others wait for, if it is clearly slower."""
    known = {rank: each.busy for rank, each in ranks.items() if each.communication is not None and each.step}
    if len(known) < 2:
        return []
    slowest = max(known, key=lambda rank: known[rank])
    others = sorted(seconds for rank, seconds in known.items() if rank != slowest)
    usual = others[len(others) // 2]
    excess = known[slowest] / usual - 1 if usual > 0 else 0.0
    return [f"slowest rank {slowest} (+{excess:.0%})"] if excess >= _WORTH_SHOWING else []


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _time(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"


class ProgressLine:
    """One line that is overwritten on a terminal; plain lines, fewer of them, elsewhere."""

    def __init__(self) -> None:
        # `phalanx run` shows an unfinished line with a carriage return as a terminal would.
        self._is_terminal = sys.stderr.isatty()
        self.is_live = self._is_terminal or "PHALANX_RUN_DIR" in os.environ
        self._width = 0
        """The width of the text on the terminal, which has to be overwritten."""
        self.is_open = False
        """The line has been shown, but not ended."""

    def show(self, text: str) -> None:
        if self.is_live:
            self._write("\r" + text.ljust(self._width))
            self._width = len(text) if self._is_terminal else 0
            self.is_open = True
        else:
            self._write(text + "\n")

    def finish(self, text: str) -> None:
        self.is_open = False
        self._write(("\r" + text.ljust(self._width) if self.is_live else text) + "\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
