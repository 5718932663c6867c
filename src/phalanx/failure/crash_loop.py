"""A run that fails the same way again and again, seconds after each start, will not be healed by another one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from phalanx.events import Ending
from phalanx.failure.failure_text import headline
from phalanx.source_lines import users_line

SOON = 10.0
"""Seconds between one failure and the next."""
ENOUGH = 5
"""Failures in a row. A few are worth a try: a port, a disk or a neighbour may need a moment."""


@dataclass
class CrashLoop:
    """Counts failures in a row without progress. It goes by what all nodes know alike, so all conclude the same."""

    count: int = 0
    _failure: Hashable = None
    _time: float = 0.0
    _furthest: tuple[int, ...] = (0, 0, 0)

    def add(self, failure: Hashable, time: float, endings: Sequence[Ending]) -> bool:
        """One more failed attempt; whether this is a crash loop by now.

        Args:
            failure: equal for equal failures, as `identity` is.
            endings: of all ranks. A later checkpoint or step of px.track than in any attempt before is progress.
        """
        reached = max((ending.progress for ending in endings), default=(0, 0, 0))
        is_further = reached > self._furthest
        is_same = failure == self._failure and 0 <= time - self._time < SOON and not is_further
        self.count = self.count + 1 if is_same else 1
        self._failure, self._time, self._furthest = failure, time, max(reached, self._furthest)
        return self.count >= ENOUGH

    def __str__(self) -> str:
        return f"a crash loop: the same failure {self.count} times in a row without progress, {SOON:g} s apart at most"


def identity(cause: Ending) -> Hashable:
    """The reason and the place: the line of code, or the rank where no line is known, and the optimizer step.

    An error that all ranks run into is raised first by one rank now and by another one later, so the line alone counts.
    """
    line = users_line(cause)
    return headline(cause), (line.file, line.line) if line is not None else cause.rank, cause.updates
