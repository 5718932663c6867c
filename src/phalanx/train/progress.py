"""What the ranks tell each other of their progress, and the line that rank zero makes of it.

By way of the store that all ranks share, once a second: no collective, so nobody waits for anybody, and a rank that
leaves its loop early disturbs nobody.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field, replace
from statistics import mean

from phalanx import attempt, messages
from phalanx.errors import ForeignData
from phalanx.store.primitives import wait_for
from phalanx.train.log import Sums
from phalanx.world import World

_WORTH_A_WORD = 0.1
"""How much longer the slowest rank must need; less is noise."""
_END_TIMEOUT = 0.5
"""Seconds for the others' last words, when rank zero has come to the end of an epoch."""


@dataclass
class Report:
    """Where one rank stands."""

    epoch: int
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Since the first batch of the epoch was asked for; the rest is part of it."""
    data: float = 0.0
    """Waiting for the loader."""
    communication: float | None = None
    """Inside collectives, which may be beside computing; None when the backend cannot tell."""
    logged: Sums = field(default_factory=dict)
    ended: bool = False

    @property
    def busy(self) -> float:
        """Seconds of a step in which this rank did not wait for others."""
        return (self.seconds - (self.communication or 0.0)) / max(1, self.step)


class Board:
    """Where each rank's latest report hangs."""

    def __init__(self, world: World, number: int) -> None:
        """``number``: of the pass, the same on all ranks."""
        self._store = world.store if world.size > 1 else None
        self._world, self._number = world, number

    def publish(self, report: Report) -> None:
        if self._store is None:
            return
        import torch.distributed as dist

        try:
            self._store.set(self._key(self._world.rank), _written(self._number, report))
            if report.ended and not self._world.is_main:
                self._store.set(self._end_key(self._world.rank), "yes")
        except dist.DistError:  # whoever hosts it has ended: no reason to stop training, which may not need it
            self._store = None

    def read(self, own: Report) -> dict[int, Report]:
        """The reports of all ranks that are in the same pass."""
        found = {self._world.rank: own}
        if self._store is None:
            return found
        import torch.distributed as dist

        try:
            for rank in range(self._world.size):
                if rank != self._world.rank and self._store.check([self._key(rank)]):
                    data = self._store.get(self._key(rank))
                    with contextlib.suppress(ForeignData, ValueError):  # a line about progress never stops training
                        number, report = _read(data)
                        if number == self._number:
                            found[rank] = report
        except dist.DistError:  # as above
            self._store = None
        return found

    def await_ends(self) -> None:
        """Rank zero waits a moment for the others to end the epoch too."""
        if self._store is None:
            return
        import torch.distributed as dist

        others = [self._end_key(rank) for rank in range(1, self._world.size)]
        try:
            if wait_for(self._store, others, _END_TIMEOUT):  # otherwise a last report is missing, and has to do
                for key in others:
                    self._store.delete_key(key)
        except dist.DistError:  # as above
            self._store = None

    def _key(self, rank: int) -> str:
        return f"phalanx/track/{rank}"

    def _end_key(self, rank: int) -> str:
        return f"phalanx/track/{rank}/end of {self._number}"


def _written(number: int, report: Report) -> bytes:
    """Sums as text: JSON has no number for what is none, or infinite."""
    sums = {name: (repr(total), count) for name, (total, count) in report.logged.items()}
    return messages.encode((number, replace(report, logged={}), sums))


def _read(data: bytes) -> tuple[int, Report]:
    shape = tuple[int, Report, dict[str, tuple[str, int]]]
    number, report, sums = messages.decode(data, shape, "the store of the run")
    report.logged = {name: (float(total), count) for name, (total, count) in sums.items()}
    return number, report


def describe(reports: dict[int, Report], own: Report, total: int | None) -> str:
    """``epoch 2, step 120/400, 5312 samples/s, loss 0.1234, 12 s left, slowest rank 3 (+8 %)``

    Of a run that was interrupted ``attempt 2 from step 70`` stands before it.
    """
    parts = [
        *filter(None, [attempt.describe()]),
        f"epoch {own.epoch}",
        f"step {own.step}" + (f"/{total}" if total is not None else ""),
    ]
    rates = [report.samples / report.seconds for report in reports.values() if report.seconds > 0]
    parts.append(f"{_short(sum(rates))} samples/s")
    parts += [f"{name} {value:.4g}" for name, value in averages(reports).items()]
    if total is not None and own.step and not own.ended:
        parts.append(f"{_time(own.seconds / own.step * (total - own.step))} left")
    elif own.ended:
        parts.append(_time(own.seconds))
    if own.seconds > 0 and own.data / own.seconds >= 0.05:
        parts.append(f"data {own.data / own.seconds:.0%}")
    return ", ".join([*parts, *_slowest(reports)])


def averages(reports: dict[int, Report]) -> dict[str, float]:
    """The mean over the ranks of what each has logged since its last report."""
    names = dict.fromkeys(name for report in reports.values() for name in report.logged)
    return {name: mean(_means(reports, name)) for name in names}


def _means(reports: dict[int, Report], name: str) -> list[float]:
    given = [report.logged[name] for report in reports.values() if name in report.logged]
    return [total / count for total, count in given]


def _slowest(reports: dict[int, Report]) -> list[str]:
    """The rank for which the others wait, if it is worth a word."""
    known = {rank: report.busy for rank, report in reports.items() if report.communication is not None and report.step}
    if len(known) < 2:
        return []
    slowest = max(known, key=lambda rank: known[rank])
    others = sorted(seconds for rank, seconds in known.items() if rank != slowest)
    usual = others[len(others) // 2]
    excess = known[slowest] / usual - 1 if usual > 0 else 0.0
    return [f"slowest rank {slowest} (+{excess:.0%})"] if excess >= _WORTH_A_WORD else []


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _time(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"


class Line:
    """One line that is written over on a terminal, and plain lines, fewer of them, elsewhere."""

    def __init__(self) -> None:
        # `phalanx run` shows an unfinished line with a carriage return as a terminal would.
        self._is_terminal = sys.stderr.isatty()
        self.is_live = self._is_terminal or "PHALANX_RUN_DIR" in os.environ
        self._width = 0
        """Of what stands there on a terminal, and has to be written over."""
        self.is_open = False
        """A line stands there without its end."""

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
