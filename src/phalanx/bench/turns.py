"""Inside the ranks: contenders that take turns at one piece of work, each turn prepared, timed and checked.

Used by the scripts that the ranks run, under torch and under MPI. It imports neither.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WARM_UPS = 2  # connections, first touches of memory; DDP arranges its buckets anew after the first step
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 25


Span = tuple[float, float]
"""Start and end by the monotonic clock, which all processes of a machine share."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """One way to do the work."""

    name: str
    calls: Sequence[Callable[[], object]]
    """One turn: these, back to back. The time of the turn is divided by their number."""
    prepare: Callable[[], object] = _nothing
    check: Callable[[], object] = _nothing
    """Raises when the turn had a wrong result."""


def calls_of(size: int, order: Mapping[str, Any]) -> int:
    """How many calls of this size make up a turn: enough to be warm, and no more than caches hold."""
    if size >= order["single_from"]:
        return 1
    return max(1, min(order["calls"], order["together"] // size))


class Turns:
    """Measures on all ranks alike, and keeps this rank's times."""

    def __init__(
        self,
        barrier: Callable[[], object],
        agree: Callable[[int], int],
        seconds: float,
        most_rounds: int = _MOST_ROUNDS,
    ) -> None:
        """``agree`` gives every rank the number of the first; ``seconds`` is about what one measurement may take."""
        self._barrier = barrier
        self._agree = agree
        self._seconds, self._most_rounds = seconds, most_rounds
        self.notes: list[dict[str, Any]] = []

    def measure(self, what: str, size: int, contenders: Sequence[Contender]) -> None:
        """All contenders get the same number of turns. Every other round is in reverse order: whoever comes after a
        slow one may find other caches than whoever comes after a fast one."""
        cost = [self._warm_up(contenders) for _ in range(_WARM_UPS)][-1]
        rounds = self._agree(min(self._most_rounds, max(_LEAST_ROUNDS, int(self._seconds / cost))))
        spans: dict[str, list[Span]] = {contender.name: [] for contender in contenders}
        for number in range(rounds):
            for contender in contenders if number % 2 == 0 else reversed(contenders):
                spans[contender.name].append(self._turn(contender))
        for contender in contenders:
            name, calls = contender.name, len(contender.calls)
            note = {"measure": what, "size": size, "contender": name, "calls": calls, "spans": spans[name]}
            self.notes.append(note)

    def _warm_up(self, contenders: Sequence[Contender]) -> float:
        """The seconds of a whole round, with all that belongs to it."""
        started = time.perf_counter()
        for contender in contenders:
            self._turn(contender)
        return time.perf_counter() - started

    def _turn(self, contender: Contender) -> Span:
        contender.prepare()
        calls = contender.calls
        self._barrier()
        started = time.monotonic()
        for call in calls:
            call()
        ended = time.monotonic()
        self._barrier()  # who checks already would take a core from who is not done
        contender.check()
        return started, ended

    def write(self, directory: Path, rank: int) -> None:
        (directory / f"rank-{rank}.json").write_text(json.dumps(self.notes))
