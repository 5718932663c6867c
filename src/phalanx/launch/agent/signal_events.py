"""Signals as events of a loop, and a way to wake it from another thread."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Sequence


class Signals:
    """Those that the agent obeys. Until `restore`, they do nothing but wait in ``pending``."""

    def __init__(self, names: Sequence[str], selector: selectors.BaseSelector) -> None:
        self.pending: list[int] = []
        self._names = names
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        selector.register(self._reader, selectors.EVENT_READ, lambda: self._reader.recv(4096))

    def take(self) -> None:
        asked = [getattr(signal, name) for name in self._names]
        # One that was ignored from the start stays so: that is how nohup and a shell's & work.
        numbers = [number for number in asked if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, lambda got, _: self.pending.append(got)) for number in numbers}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def restore(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wake(self) -> None:
        """Ends the loop's sleep; may be called from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: the loop is about to wake anyway
            self._writer.send(b"\0")

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
