"""When a save is due: every so many steps, or every so many seconds by the clock of rank 0."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from phalanx.errors import UsageError

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


class Always:
    """Every call of save() saves."""

    def is_due(self, step: int) -> bool:
        return True

    def done(self, step: int) -> None:
        """The state of ``step`` was saved or loaded."""


class EverySteps(Always):
    """Due when a multiple of ``every`` has been reached or passed since the last one."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._last = 0

    def is_due(self, step: int) -> bool:
        return step // self._every > self._last // self._every

    def done(self, step: int) -> None:
        self._last = step


class EverySeconds(Always):
    """Due when so much time has passed on rank 0.

    All ranks have to save at the same call. To ask rank 0 at each would cost a message a step, so it says each time
    how many calls to let pass: half of those that fit into what is left.
    """

    def __init__(self, seconds: float, ask: Callable[[Callable[[], int], type[int]], int]) -> None:
        """``ask(work)`` has rank 0 do the work, and gives its result to all."""
        self._seconds, self._ask = seconds, ask
        self._begin()

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._calls = 0
        self._ask_at = 1

    def is_due(self, step: int) -> bool:
        self._calls += 1
        if self._calls < self._ask_at:
            return False
        wait = self._ask(self._calls_to_wait, int)
        self._ask_at = self._calls + wait
        return wait == 0

    def _calls_to_wait(self) -> int:
        """On rank 0; nothing when the time has come."""
        passed = time.monotonic() - self._began
        if passed >= self._seconds:
            return 0
        fitting = (self._seconds - passed) / (passed / self._calls) if passed > 0 else 1.0
        return max(1, min(int(fitting / 2), self._calls))

    def done(self, step: int) -> None:
        self._begin()


def parse(every: int | str | None, ask: Callable[[Callable[[], int], type[int]], int]) -> Always:
    """None, a number of steps, or a time such as "90s", "10min" or "1h"."""
    if every is None:
        return Always()
    if isinstance(every, str):
        found = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(s|sec|min|h)", every.strip())
        if found is None or float(found[1]) == 0:
            raise UsageError(
                f'every={every!r} is no time; give a number of steps, or a time like "90s", "10min", "1h".'
            )
        return EverySeconds(float(found[1]) * _UNITS[found[2]], ask)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f'every={every!r} is no number of steps; give 1 or more, or a time like "10min".')
    return EverySteps(every)
