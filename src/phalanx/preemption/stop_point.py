"""The rank's side of a stop: it votes on the step at which all ranks stop, and stops there.

A stop point is the end of an optimizer's step. Without a request one costs less than a microsecond.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns

from phalanx.preemption import words
from phalanx.preemption.handlers import NOTICES, SignalHandlers
from phalanx.status import layout

_HOLD_LIMIT = 60.0
"""Seconds that a rank holds at a stop point for its agent."""
_LOOK_EVERY = 0.0005
_EPOCH, _INTERVAL, (_COLLECTIVES, _STOP_POINTS) = words.EPOCH, words.INTERVAL, words.CLOCKS
_current: StopPoints | None = None
_own_reason: str | None = None


class StopPoints:
    """The stop points of this rank, and the stop itself."""

    def __init__(self, memory: mmap.mmap, report: Callable[[int, str], bool]) -> None:
        """``memory``: of the status page; ``report``: sends a request to the agent: a signal, or 0 and a reason. It
        returns False without an agent."""
        self._memory, self._words = memory, memoryview(memory).cast("Q")
        self._report = report
        self._pid = os.getpid()
        self._thread: int | None = get_ident()
        os.register_at_fork(after_in_child=self._forget)  # a system call in every step would take longer than the rest
        self._passed = (0, 0)
        """Both clocks at the last stop point."""
        self._stood_still = 0
        self._epoch = 0
        self._stop_at: int | None = None
        """The proposed value of the clock, if this rank has voted for it."""
        self._clock = words.STOP_POINTS
        self._asks = self._trains = False
        self._at = monotonic_ns()
        """When the last stop point was passed."""
        self.reason: str | None = None
        """Why this rank has to stop; None as long as it has not."""
        self.handlers = SignalHandlers(self._withhold, self._write_handled)

    def ask(self) -> None:
        """The script asks px.stop: a signal that it does not handle requests a stop instead of ending it."""
        if not self._asks and get_ident() == self._thread:  # only the main thread can set handlers
            self._asks = True
            self.handlers.catch_stops()
            self._write_handled()

    def request(self, reason: str) -> None:
        """Requests a stop of all ranks."""
        self._report(0, reason)

    def will_step(self) -> None:
        """The script has made an optimizer: from now on a signal waits for a stop point."""
        if not self._trains and os.getpid() == self._pid:
            self._trains = True
            self._write_handled()

    def passed(self, collectives: int) -> None:
        """To be called after every step of an optimizer. ``collectives``: those of the world so far."""
        if get_ident() != self._thread:
            return
        page, before = self._words, self._passed
        self._passed = collectives, before[1] + 1
        page[_COLLECTIVES], page[_STOP_POINTS] = self._passed
        now = monotonic_ns()
        page[_INTERVAL], self._at = now - self._at, now
        if collectives != before[0]:
            self._stood_still = 0
        elif self._stood_still < 2:
            self._stood_still += 1
            page[words.STANDS_STILL] |= self._stood_still >> 1
        if page[_EPOCH] != self._epoch:
            self._vote(before)
        if self._stop_at is not None and self._passed[self._clock] >= self._stop_at:
            self._hold(before)

    def _forget(self) -> None:
        """In a process that the rank has forked: its steps are not the rank's."""
        self._thread = None

    def _vote(self, before: tuple[int, int]) -> None:
        """Votes yes if no stop point at or after the proposed one is behind this rank."""
        page = self._words
        self._epoch = page[words.EPOCH]
        step, self._clock = page[words.STEP], page[words.CLOCK] & 1
        accepts = before[self._clock] < step
        self._stop_at = step if accepts else None
        page[words.VOTE] = 2 * self._epoch + accepts

    def _hold(self, before: tuple[int, int]) -> None:
        """Waits at the proposed stop point until the agent commits, proposes another, or releases the ranks."""
        page, limit = self._words, time.monotonic() + _HOLD_LIMIT
        while self._stop_at is not None and self._passed[self._clock] >= self._stop_at:
            if page[words.COMMITTED] == self._epoch:
                self._stop_at = None
                page[words.DELIVERED] = self._epoch
                self._stop(page[words.SIGNAL])
            elif page[words.EPOCH] != self._epoch:
                self._vote(before)
            elif time.monotonic() > limit:
                self._stop_at = None
            else:
                time.sleep(_LOOK_EVERY)

    def _stop(self, number: int) -> None:
        if number not in NOTICES or number not in self.handlers.handled:  # else it is the script's own affair
            self.reason = self.reason or self._describe(number)
        self.handlers.deliver(number)

    def _withhold(self, number: int) -> bool:
        """Whether the signal is delivered later: at the step that the ranks agree on, or when the agent sends it."""
        is_released = bool(self._words[words.RELEASED] >> number & 1)
        if is_released and number in NOTICES:  # the ranks continue, and agree on the next one again
            self._words[words.RELEASED] = 0
        is_at_once = is_released or not (self._trains or self._passed[1])
        if not is_at_once and self._report(number, ""):
            return True
        if self._asks:
            self.reason = self.reason or self._describe(number)
        return False

    def _write_handled(self) -> None:
        bits = sum(1 << number for number in self.handlers.handled)
        self._words[words.HANDLES] = bits | self._asks << words.ASKS | self._trains << words.TRAINS

    def _describe(self, number: int) -> str:
        at = words.REASON * layout.WORD
        given = self._memory[at : at + words.REASON_BYTES].rstrip(b"\0").decode(errors="ignore")
        return given or (signal.Signals(number).name if number else "a request")


def begin(memory: mmap.mmap, report: Callable[[int, str], bool]) -> StopPoints:
    """Makes the stop points of this process, on its main thread."""
    global _current
    _current = StopPoints(memory, report)
    _current.handlers.install()
    return _current


def request_alone(reason: str) -> None:
    """Requests a stop of this process, which no agent has started."""
    global _own_reason
    _own_reason = _own_reason or reason


def reason() -> str | None:
    """Why this process has to stop; None as long as it has not."""
    return _own_reason if _current is None else _current.reason


def current() -> StopPoints | None:
    return _current
