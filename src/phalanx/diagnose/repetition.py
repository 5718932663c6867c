"""A run that fails the same way again and again, seconds after each start, will not be healed by another one."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.diagnose.report import headline
from phalanx.events import Ending

SOON = 10.0
"""Seconds between one failure and the next."""
ENOUGH = 5
"""Failures in a row. A few are worth a try: a port, a disk or a neighbour may need a moment."""


@dataclass
class Repetition:
    """Counts. It goes by what all nodes know alike, so they come to the same conclusion."""

    count: int = 0
    _headline: str = ""
    _time: float = 0.0

    def add(self, cause: Ending) -> bool:
        """One more failed attempt; whether this is a crash loop by now."""
        text = headline(cause)
        is_same = text == self._headline and 0 <= cause.time - self._time < SOON
        self.count = self.count + 1 if is_same else 1
        self._headline, self._time = text, cause.time
        return self.count >= ENOUGH

    def __str__(self) -> str:
        return f"a crash loop: the same failure {self.count} times in a row, {SOON:g} s apart at most"
