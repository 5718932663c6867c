"""Decides when a save is due: at every call, after a number of steps, or after a time by the clock of rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx import argparser
from phalanx.errors import UsageError


class Schedule:
    """Decides at each call of save() whether to save; the same on all ranks.

    Asking rank 0 for the time at each call would cost a message a step, so it answers with the number of calls until
    it is asked again: half of those that fit into the time that is left.
    """

    def __init__(self, every: int | str | None, ask: Callable[[Callable[[], int], type[int]], int]) -> None:
        """``every`` is None, a number of steps, or a time such as "10min"; ``ask`` calls a function on rank 0."""
        self._steps: int | None = None
        self._seconds = _parse_time(every) if isinstance(every, str) else None
        if every is not None and not isinstance(every, str):
            if isinstance(every, bool) or not isinstance(every, int) or every < 1:
                raise UsageError(f'every={every!r} is no number of steps; give 1 or more, or a time like "10min".')
            self._steps = every
        self._ask = ask
        self.record(0)

    def record(self, step: int) -> None:
        """Records that the state of ``step`` was saved or loaded."""
        self._last = step
        self._began = time.monotonic()
        self._calls, self._ask_at = 0, 1

    def is_due(self, step: int) -> bool:
        if self._seconds is None:
            return self._steps is None or step // self._steps > self._last // self._steps
        self._calls += 1
        if self._calls < self._ask_at:
            return False
        seconds = self._seconds
        wait = self._ask(lambda: self._calls_to_wait(seconds), int)
        self._ask_at = self._calls + wait
        return wait == 0

    def _calls_to_wait(self, seconds: float) -> int:
        """Returns the number of calls until the next question, on rank 0; 0 if a save is due."""
        passed = time.monotonic() - self._began
        if passed >= seconds:
            return 0
        fitting = (seconds - passed) / (passed / self._calls) if passed > 0 else 1.0
        return max(1, min(int(fitting / 2), self._calls))


def _parse_time(text: str) -> float:
    seconds = argparser.duration(text)
    if not seconds:
        raise UsageError(f'every={text!r} is no time; give a number of steps, or a time like "90s", "10min", "1h".')
    return seconds
