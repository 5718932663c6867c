"""What the series of many jobs come to, with the contenders side by side."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.bench.jobs import Series
from phalanx.bench.summary import Summary


@dataclass(frozen=True)
class Row:
    """All contenders at one piece of work: a collective of one size, or a step of a model."""

    measure: str
    ranks: int
    size: int
    turns: Mapping[str, Mapping[int, Sequence[float]]]
    """Contender to repeat to the times of its turns, in µs."""
    times: Mapping[str, Summary]
    """Contender to µs over all turns of all repeats, with the quartiles."""

    @property
    def repeats(self) -> dict[str, dict[int, float]]:
        """Contender to repeat to the median of its turns, in µs."""
        return {
            name: {repeat: statistics.median(times) for repeat, times in found.items()}
            for name, found in self.turns.items()
        }

    def ratio(self, over: str, under: str) -> Summary | None:
        """Of the medians of each repeat, for within one all had the same noise around them; with the extremes."""
        return self._compare(over, under, lambda a, b: a / b)

    def difference(self, of: str, to: str) -> Summary | None:
        """In µs, the same way."""
        return self._compare(of, to, lambda a, b: a - b)

    def cost(self, of: str, to: str) -> Summary | None:
        """In µs: the median of what two turns differ by that came one after the other, in each repeat. It shows
        differences that are smaller than what the machine's pace changes by within a repeat."""
        ones, others = self.turns.get(of, {}), self.turns.get(to, {})
        return Summary.of(
            [statistics.median(map(operator.sub, ones[repeat], others[repeat])) for repeat in ones if repeat in others]
        )

    def _compare(self, one: str, other: str, how: Callable[[float, float], float]) -> Summary | None:
        ones, others = self.repeats.get(one, {}), self.repeats.get(other, {})
        return Summary.of([how(ones[repeat], others[repeat]) for repeat in ones if repeat in others])


def rows(series: Sequence[Series]) -> list[Row]:
    """One for each piece of work, number of ranks and size, in the order in which they were first measured."""
    groups: dict[tuple[str, int, int], dict[str, list[Series]]] = {}
    for each in series:
        group = groups.setdefault((each.measure, each.ranks, each.size), {})
        group.setdefault(each.contender, []).append(each)
    return [_row(*key, group) for key, group in groups.items()]


def _row(measure: str, ranks: int, size: int, group: Mapping[str, Sequence[Series]]) -> Row:
    turns, times = {}, {}
    for contender, found in group.items():
        turns[contender] = {each.repeat: each.microseconds for each in found}
        summary = Summary.quartiles([time for each in found for time in each.microseconds])
        if summary is not None:
            times[contender] = summary
    return Row(measure, ranks, size, turns, times)
