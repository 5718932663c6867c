"""Detects a run that fails in the same way again and again, seconds after each start. Another restart does not help."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from phalanx.events import Ending
from phalanx.failure.failure_text import headline
from phalanx.source_lines import users_line

SOON = 10.0
"""Seconds between one failure and the next."""
ENOUGH = 5
"""Failures in a row. A few are worth a try: a port, a disk or another job may need a moment."""


@dataclass
class CrashLoop:
    """Counts failures in a row without progress. It uses only what all nodes know, so all conclude the same."""

    count: int = 0
    _failure: Hashable = None
    _time: float = 0.0
    _furthest: tuple[int, ...] = (0, 0, 0)

    def add(self, failure: Hashable, time: float, endings: Sequence[Ending]) -> bool:
        """Counts a failed attempt, and returns True if this is a crash loop.

        Args:
            failure: a value that is equal for equal failures, see `identity`.
            endings: the ends of all ranks. A later checkpoint or step of px.track than ever before is progress.
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
    """Returns the reason, the line of code (or the rank, if no line is known), and the optimizer step of a failure.

    An error on all ranks is raised first by one rank now and by another one later, so the line counts, not the rank.
    """
    line = users_line(cause)
    return headline(cause), (line.file, line.line) if line is not None else cause.rank, cause.updates
