"""Times the steps of a rank by its accelerator's own clock, and finds out what the accelerator does now.

The host runs ahead of the device, so its clock shows neither own work nor waiting. Two events go into the device's
queue with each backward of DDP: one when the first parameter has its gradient, where the rank's own work ends, and one
after backward, where DDP has made the queue wait for the other ranks. Where the device had nothing left to do when a
batch came, a third one shows for how long. Events are read once they have passed: nothing waits for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

import torch

from phalanx.devices import accelerator
from phalanx.status import layout
from phalanx.status.page import StatusPage

_OWN, _WAIT, _DATA, _STEP = range(4)
"""What ends at a mark. The first three are indices of the seconds in the page."""
clock: DeviceClock | None = None
device = torch.device("cpu")  # of the loop, as far as it is known before there is a clock


def of_optimizer(optimizer: torch.optim.Optimizer, page: StatusPage) -> DeviceClock | None:
    """Returns the clock of the device that an optimizer's parameters are on; None: they are on the CPU."""
    global clock
    parameter = next((one for group in optimizer.param_groups for one in group["params"]), None)
    if parameter is None or parameter.is_cpu:
        return None
    if clock is None or clock.page is not page:
        clock = DeviceClock(page, parameter.device)
    return clock


class DeviceClock:
    """The marks in the queue of one device. An error of the device is left to the script, which will meet it too."""

    def __init__(self, page: StatusPage, device: torch.device) -> None:
        self.page, self.device = page, device
        self._marks: deque[tuple[int, Any, float]] = deque()
        """What ends, its event, and for data the seconds that the host waited, for a step its number."""
        self._seconds = [0.0, 0.0, 0.0]
        self._last: Any = None
        """The last event that has passed."""
        self._probe: Any = None
        """An event behind all that was in the queue when a reader last asked."""
        self._stream: Any = None
        self._is_in_backward = self._has_backward = self.is_capturing = False
        self._lock = threading.Lock()
        page.device_is(layout.UNKNOWN)
        page.when_fetched = self.fetched

    def own_work_ends(self) -> None:
        self._is_in_backward = self._mark(_OWN)

    def backward_ends(self) -> None:
        if self._is_in_backward:
            self._is_in_backward, self._has_backward = False, self._mark(_WAIT)

    def fetched(self, seconds: float) -> None:
        """Marks that a batch has come, unless the device is still busy: then it has not waited for it."""
        self._read_passed()
        if self._last is not None and not self._marks:
            self._mark(_DATA, seconds)

    def stepped(self) -> None:
        if self._has_backward:  # a step without a timed backward is not counted
            self._has_backward = False
            self._marks.append((_STEP, None, self.page.updates))
        self._read_passed()

    def _captures(self) -> bool:
        """Notes for all threads whether the loop captures a graph: the use of any event would break that."""
        self.is_capturing = getattr(accelerator.module(self.device), "is_current_stream_capturing", bool)()
        return self.is_capturing

    def _mark(self, ends: int, value: float = 0.0) -> bool:
        with contextlib.suppress(RuntimeError, AttributeError):  # or there are no events on this kind of device
            if not self._captures():
                functions = accelerator.module(self.device)
                self._stream, event = functions.current_stream(self.device), functions.Event(enable_timing=True)
                event.record(self._stream)
                self._marks.append((ends, event, value))
                return True
        return False

    def _read_passed(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):
            if not self._captures():
                self._take_passed()

    def _take_passed(self) -> None:
        while self._marks and (self._marks[0][0] == _STEP or self._marks[0][1].query()):
            self._take(*self._marks.popleft())

    def _take(self, ends: int, event: Any, value: float) -> None:
        if ends == _STEP:
            self.page.device_stepped(int(value), *self._seconds)
            return
        if self._last is not None:
            seconds = self._last.elapsed_time(event) / 1000
            data = min(seconds, value) if ends == _DATA else 0.0
            self._seconds[_DATA] += data
            self._seconds[_WAIT if ends == _WAIT else _OWN] += seconds - data
        self._last = event

    def answer(self) -> None:
        """Writes what the device does. To be called on the recorder's thread, when its device is set."""
        if self._stream is None or self.is_capturing:
            return
        with self._lock, contextlib.suppress(RuntimeError):
            self._take_passed()
            is_idle = self._probe is not None and self._probe.query()
            if self._probe is None or is_idle:
                self._probe = accelerator.module(self.device).Event()
                self._probe.record(self._stream)
                if not (is_idle or self._marks):
                    return  # the next time it is known
            waits = self._marks[0][0] == _WAIT if self._marks else self._is_in_backward
            self.page.device_is(layout.IDLE if is_idle else layout.WAITS if waits else layout.BUSY)
