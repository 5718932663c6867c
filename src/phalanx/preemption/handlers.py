"""The script's signal handlers, called at the step that all ranks have agreed on.

A signal that asks a run to stop reaches its ranks at different moments; handlers that save together would wait for each
other at different steps. So once a rank has an optimizer, a handler of the script is not called when the signal comes:
the rank reports the signal to its agent, and calls the handler at the agreed step. Before that, and without an agent, a
handler is called at once. `signal.signal` and `signal.getsignal` show the script its own handlers.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

STOPS = (signal.SIGTERM, signal.SIGINT)
_OTHERS = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2", "SIGHUP") if hasattr(signal, name)]
"""Windows has none of them."""
NOTICES = tuple(_OTHERS[:2])
SCHEDULER_SIGNALS = (*STOPS, *_OTHERS)
"""Those that a scheduler may send to every process of a job."""
_plain_signal, _plain_getsignal = signal.signal, signal.getsignal


class SignalHandlers:
    """The handlers of this process's script.

    Args:
        withhold: called with a signal that has come; returns whether it is to be delivered later.
        changed: called when the script handles other signals than before.
    """

    def __init__(self, withhold: Callable[[int], bool], changed: Callable[[], None]) -> None:
        self._withhold, self._changed = withhold, changed
        self._pid = os.getpid()
        self.handled: dict[int, Handler] = {}
        """The handlers of the script's own, by their signals."""
        self._delivered: set[int] = set()
        self._catches_stops = False

    def install(self) -> None:
        """Replaces `signal.signal` and `signal.getsignal`. A notice without a handler no longer ends the process."""

        @functools.wraps(_plain_signal)
        def set_handler(signalnum: int, handler: Any) -> Any:
            number = signalnum  # the name of Python's own parameter
            if os.getpid() != self._pid or number not in (*STOPS, *NOTICES):
                return _plain_signal(number, handler)
            before = get_handler(number)
            is_default = handler == _default(number)
            is_own = callable(handler) and not is_default
            is_reported = is_default and (number in NOTICES or self._catches_stops)
            _plain_signal(number, self._on_signal if is_own or is_reported else handler)
            if is_own:
                self.handled[number] = handler
            else:
                self.handled.pop(number, None)
            self._changed()
            return before

        @functools.wraps(_plain_getsignal)
        def get_handler(signalnum: int) -> Any:
            handler = _plain_getsignal(signalnum)
            return self.handled.get(signalnum, _default(signalnum)) if handler == self._on_signal else handler

        for number in NOTICES:
            if _plain_getsignal(number) == signal.SIG_DFL:
                _plain_signal(number, self._on_signal)
        signal.signal, signal.getsignal = set_handler, get_handler  # type: ignore[assignment]
        os.register_at_fork(after_in_child=self._forget_ours)

    def _forget_ours(self) -> None:
        """In a process that the rank has forked: what the script does not handle does what it always does."""
        for number in (*STOPS, *NOTICES):
            if _plain_getsignal(number) == self._on_signal and number not in self.handled:
                _plain_signal(number, _default(number))

    def catch_stops(self) -> None:
        """From now on SIGTERM and Ctrl-C are reported too, where the script has no handler of its own."""
        self._catches_stops = True
        for number in STOPS:
            if _plain_getsignal(number) == _default(number):
                _plain_signal(number, self._on_signal)

    def deliver(self, number: int) -> None:
        """Calls the script's handler, if there is one; for SIGTERM once in a process."""
        if number in self.handled and not (number == signal.SIGTERM and number in self._delivered):
            self._delivered.add(number)
            _without_delay(self.handled[number])(number, sys._getframe(2))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Calls the script's handler, now or later."""
        if os.getpid() == self._pid:
            if number == signal.SIGTERM and number in self._delivered:
                return
            if self._withhold(number):
                return
            self._delivered.add(number)
        handler = self.handled.get(number)
        if handler is not None:
            _without_delay(handler)(number, frame)


def _default(number: int) -> Any:
    """What Python does on a signal by itself."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _without_delay(handler: Handler) -> Handler:
    """Hugging Face's Trainer saves three seconds after SIGTERM, by a timer: the ranks would at different steps."""
    owner = getattr(handler, "__self__", None)
    save_now = getattr(owner, "_enable_checkpoint", None)
    if save_now is None or type(owner).__module__ != "transformers.trainer_jit_checkpoint":
        return handler
    return lambda *_: save_now()
