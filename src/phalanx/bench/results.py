"""Samples, what they come to, and the goals they are held against."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.bench.contenders import FORK, TORCHRUN
from phalanx.bench.summary import Summary

HELP = "phalanx --help"


@dataclass(frozen=True)
class Sample:
    """One command that was measured."""

    measure: str
    """``start``, ``restart``, ``recovery`` and ``help`` in seconds, ``memory`` in bytes."""
    contender: str
    ranks: int
    repeat: int
    value: float | None
    """None when the contender cannot do this; the note says why."""
    note: str = ""


@dataclass(frozen=True)
class Line:
    """All samples of one contender at one number of ranks."""

    contender: str
    ranks: int
    value: Summary | None
    ratio: Summary | None
    """To torchrun in the same repeat: both had the same noise around them. Repeats without a figure are left out."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Goal:
    """What phalanx promises of itself, checked on the median."""

    measure: str
    contender: str
    ranks: int
    limit: float
    relative: bool
    """The limit is a part of torchrun's figure, not seconds."""

    def judge(self, line: Line) -> str:
        summary = line.ratio if self.relative else line.value
        if summary is None:
            return f"≤ {self.limit:g}: not measured"
        return f"≤ {self.limit:g}: {'met' if summary.median <= self.limit else 'missed'}"


GOALS = (
    Goal("start", FORK.name, 2, 0.55, relative=True),
    Goal("start", FORK.name, 8, 0.22, relative=True),
    Goal("start", FORK.name, 16, 0.14, relative=True),
    Goal("memory", FORK.name, 8, 0.3, relative=True),
    Goal("restart", FORK.name, 4, 0.3, relative=False),
    Goal("recovery", "phalanx", 2, 0.25, relative=True),
    Goal("recovery", "phalanx", 4, 0.25, relative=True),
    Goal("help", HELP, 0, 0.1, relative=False),
)


def lines(samples: Iterable[Sample], measure: str) -> list[Line]:
    """One for each number of ranks and contender, in the order in which they were first measured."""
    groups: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        if sample.measure == measure:
            groups.setdefault((sample.ranks, sample.contender), []).append(sample)
    found = []
    for (ranks, contender), group in groups.items():
        beside = {sample.repeat: sample.value for sample in groups.get((ranks, TORCHRUN.name), ())}
        values = [(sample.value, beside.get(sample.repeat)) for sample in group if sample.value is not None]
        ratios = [value / other for value, other in values if other is not None]
        found.append(
            Line(contender, ranks, Summary.of([value for value, _ in values]), Summary.of(ratios), _notes(group))
        )
    return found


def _notes(group: Sequence[Sample]) -> tuple[str, ...]:
    """Each note once; one that stands in place of a figure says how often, for some fail only at times."""
    counts = collections.Counter((sample.note, sample.value is None) for sample in group if sample.note)
    return tuple(f"{note} ({count} of {len(group)})" if missing else note for (note, missing), count in counts.items())


def goal(measure: str, line: Line) -> str:
    """The verdict on this line, empty when nothing was promised for it."""
    for each in GOALS:
        if (each.measure, each.contender, each.ranks) == (measure, line.contender, line.ranks):
            return each.judge(line)
    return ""
