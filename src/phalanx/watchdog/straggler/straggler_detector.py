"""Finds the rank that slows down the others, by how much, and in which phase: pure functions of windows of ten steps.

It compares the own work of the ranks in the same steps, without their waits for others: in a data-parallel run every
step takes all ranks equally long, so the time of a whole step shows no difference.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from phalanx.status.layout import WINDOW_STEPS
from phalanx.status.windows import Window

SLOWER = 0.2
"""The part by which a straggler's own work exceeds the median of the others."""
NOTICEABLE = 1e-3
"""Seconds in a step; less is noise."""
ENOUGH = 5
"""Windows in a row."""
_NAMED = 0.25
"""The part of the difference from which on a phase is named."""
_KEPT = 64
_LONGEST_ROW = 500


@dataclass(frozen=True)
class Lag:
    """One rank compared with the others, in seconds per step."""

    own: float
    """Its own work."""
    usual: float
    """The median of the others."""
    excess: Mapping[str, float]
    """By phase, how much more it needs than the median of the others."""
    updates: int = 0
    """The last step that was compared."""

    @property
    def slower(self) -> float:
        """The part by which it is slower: 0.3 is 30 %."""
        return self.own / self.usual - 1 if self.usual > 0 else 0.0

    @property
    def is_slow(self) -> bool:
        return self.slower > SLOWER and self.own - self.usual > NOTICEABLE

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases with most of the difference, largest first."""
        total = sum(max(0.0, seconds) for seconds in self.excess.values())
        by_size = sorted(self.excess.items(), key=lambda pair: -pair[1])
        return tuple(phase for phase, seconds in by_size if total > 0 and seconds >= _NAMED * total)


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow, or that was slow and keeps up again."""

    rank: int
    lag: Lag
    steps: int
    """The number of steps for which that is so."""
    is_over: bool = False


class Judge:
    """Compares the windows of all ranks of an attempt."""

    def __init__(self) -> None:
        self._windows: dict[int, dict[int, Window]] = {}
        """By rank and step."""
        self._judged = 0
        """The last step."""
        self._rows: dict[int, deque[Lag]] = {}
        """By rank, the windows in a row in which it was slow; for a straggler, in which it was not."""
        self._stragglers: set[int] = set()

    @property
    def suspects(self) -> set[int]:
        """The ranks that were slow in the last window, and may become stragglers."""
        return {rank for rank, row in self._rows.items() if row} - self._stragglers

    def add(self, windows: Mapping[int, Sequence[Window]]) -> list[Straggler]:
        """Returns the new stragglers and those that keep up again. ``windows``: the latest of every living rank."""
        for rank in self._windows.keys() - windows.keys():
            del self._windows[rank]
            self._rows.pop(rank, None)
            self._stragglers.discard(rank)
        for rank, latest in windows.items():
            known = self._windows.setdefault(rank, {})
            known.update((window.updates, window) for window in latest)
            for step in sorted(known)[:-_KEPT]:
                del known[step]
        taking_part = {rank: known for rank, known in self._windows.items() if known}
        found: list[Straggler] = []
        if len(taking_part) > 1:
            common = set.intersection(*(set(known) for known in taking_part.values()))
            for step in sorted(step for step in common if step > self._judged):
                self._judged = step
                found += self._judge({rank: known[step] for rank, known in taking_part.items()})
        return found

    def _judge(self, step: Mapping[int, Window]) -> list[Straggler]:
        found = []
        field = Field(step)
        for rank in step:
            lag = field.compare(rank)
            row = self._rows.setdefault(rank, deque(maxlen=_LONGEST_ROW))
            was_slow = rank in self._stragglers
            if lag.is_slow == was_slow:
                row.clear()
                continue
            row.append(lag)
            if len(row) >= ENOUGH:
                found.append(Straggler(rank, summary(row), row[-1].updates - row[0].updates + WINDOW_STEPS, was_slow))
                (self._stragglers.discard if was_slow else self._stragglers.add)(rank)
                row.clear()
        return found


class Field:
    """All ranks in one window, sorted once."""

    def __init__(self, step: Mapping[int, Window]) -> None:
        self._step = step
        self._own = sorted(window.own for window in step.values())
        phases = {phase for window in step.values() for phase in window.seconds}
        self._seconds = {phase: sorted(one.seconds.get(phase, 0.0) for one in step.values()) for phase in phases}

    def compare(self, rank: int) -> Lag:
        """Compares one rank with the others."""
        own = self._step[rank]
        excess = {
            phase: (seconds - _median_of_others(self._seconds[phase], seconds)) / WINDOW_STEPS
            for phase, seconds in own.seconds.items()
        }
        return Lag(own.own, _median_of_others(self._own, own.own), excess, own.updates)


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Returns the median without ``own``. Of two in the middle the slower one counts: with a single fast rank among
    three, the other two are not slow."""
    middle = (len(ordered) - 1) // 2
    return ordered[middle + 1] if bisect_left(ordered, own) <= middle else ordered[middle]


def summary(row: Sequence[Lag]) -> Lag:
    """Returns the median of several windows: one with a checkpoint or an evaluation in it does not count."""
    return Lag(
        own=median(lag.own for lag in row),
        usual=median(lag.usual for lag in row),
        excess={phase: median(lag.excess[phase] for lag in row) for phase in row[0].excess},
        updates=row[-1].updates,
    )


def slowest(windows: Mapping[int, Sequence[Window]]) -> tuple[int, Lag] | None:
    """Returns the rank with most work of its own, by the steps that all ranks have in common."""
    by_step = {rank: {window.updates: window for window in known} for rank, known in windows.items() if known}
    if len(by_step) < 2:
        return None
    common = sorted(set.intersection(*(set(known) for known in by_step.values())))
    if not common:
        return None
    steps = [{rank: known[step] for rank, known in by_step.items()} for step in common]
    fields = [Field(step) for step in steps]
    lags = {rank: summary([field.compare(rank) for field in fields]) for rank in by_step}
    return max(lags.items(), key=lambda pair: pair[1].own)


# ---- as text


def one_line(straggler: Straggler, host: str, conditions: object) -> str:
    """Describes a straggler on one line. ``conditions``: under which it works; None if they are not known."""
    rank, lag = straggler.rank, straggler.lag
    if straggler.is_over:
        return f"rank {rank} keeps up again: {work(lag)}, for {straggler.steps} steps"
    text = f"rank {rank} is {percent(lag.slower)} slower than the median ({work(lag)}) for {straggler.steps} steps"
    text += f", in {phases(lag)}"
    return f"{text}; on host {host}: {conditions}" if conditions is not None else text


def work(lag: Lag) -> str:
    return f"own work {milliseconds(lag.own)} a step against {milliseconds(lag.usual)}"


def phases(lag: Lag) -> str:
    """Returns ``data``, or ``forward and backward``."""
    *most, last = lag.phases or ("no phase more than in others",)
    return f"{', '.join(most)} and {last}" if most else last


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def milliseconds(seconds: float) -> str:
    amount = seconds * 1e3
    return f"{amount:.0f} ms" if amount >= 9.95 else f"{amount:.1f} ms"
