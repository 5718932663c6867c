"""The goals that the figures of `phalanx bench collectives` are held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.bench.rows import Row
from phalanx.bench.summary import Summary

KB, MB = 2**10, 2**20
SHM, GLOO, MPI, LIMIT = "shm", "gloo", "MPI", "a += b"
OTHERS = ("broadcast", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Goal:
    """What phalanx promises of itself, checked on the median."""

    name: str
    figure: Callable[[Row], Summary | None]
    limit: float
    at_least: bool
    least_size: int
    most_size: float
    measures: tuple[str, ...] = ("all_reduce",)
    ranks: tuple[int, ...] = (2, 4)

    def judge(self, row: Row) -> str:
        """The verdict on this row, empty when nothing was promised for it."""
        if row.measure not in self.measures or row.ranks not in self.ranks:
            return ""
        if not self.least_size <= row.size <= self.most_size:
            return ""
        figure = self.figure(row)
        promise = f"{self.name} {'≥' if self.at_least else '≤'} {self.limit:g}"
        if figure is None:
            return f"{promise}: not measured"
        met = figure.median >= self.limit if self.at_least else figure.median <= self.limit
        return f"{promise}: {'met' if met else 'missed'}"


def _over_shm(contender: str) -> Callable[[Row], Summary | None]:
    return lambda row: row.ratio(contender, SHM)


GOALS = (
    Goal("gloo/shm", _over_shm(GLOO), 20, True, 4, 64 * KB),
    Goal("gloo/shm", _over_shm(GLOO), 10, True, MB, MB),
    Goal("gloo/shm", _over_shm(GLOO), 5, True, 4 * MB, math.inf),
    Goal("gloo/shm", _over_shm(GLOO), 4, True, 25 * MB, 25 * MB, OTHERS),
    Goal("shm − MPI, µs,", lambda row: row.difference(SHM, MPI), 15, False, 4, 16 * KB - 1),
    Goal("MPI/shm", _over_shm(MPI), 1, True, 16 * KB, 16 * MB - 1),
    Goal("MPI/shm", _over_shm(MPI), 2, True, 16 * MB, math.inf),
    Goal("shm, µs,", lambda row: row.times.get(SHM), 15, False, 4, 4, ranks=(2,)),
    # With two ranks all_reduce moves as many bytes as `a += b` on both: nothing can be faster.
    Goal("shm/limit", lambda row: row.ratio(SHM, LIMIT), 1.35, False, 256 * MB, 256 * MB, ranks=(2,)),
)


def verdicts(row: Row) -> list[str]:
    return [verdict for verdict in (goal.judge(row) for goal in GOALS) if verdict]
