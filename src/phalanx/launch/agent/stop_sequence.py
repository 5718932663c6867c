"""How workers are asked to end: politely, then firmly, then without asking, within the shutdown timeout."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field


@dataclass
class StopSequence:
    """Signals and the moments (on the monotonic clock) when they are due."""

    steps: list[tuple[float, int]] = field(default_factory=list)

    @staticmethod
    def plan(first: int, timeout: float) -> StopSequence:
        """SIGINT leaves the last second of the timeout to SIGTERM; whatever is left at its end is killed."""
        start = time.monotonic()
        end = (start + timeout, signal.SIGKILL)
        if timeout <= 0:
            return StopSequence([end])
        if first == signal.SIGINT:
            firmly = start + timeout - min(1.0, timeout / 2)
            return StopSequence([(start, signal.SIGINT), (firmly, signal.SIGTERM), end])
        return StopSequence([(start, first), end])

    @property
    def next_step(self) -> float | None:
        return self.steps[0][0] if self.steps else None

    def due(self, now: float) -> list[int]:
        """The signals whose moment has come; each is given out once."""
        signals = [number for moment, number in self.steps if moment <= now]
        self.steps = self.steps[len(signals) :]
        return signals
