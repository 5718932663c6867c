"""The event loop of the agent and of the conductor: files, signals, pipes, and wake-ups by other threads."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Iterable

from phalanx.launch.output.logs import OutputPipe


class EventLoop:
    """A selector whose keys hold the functions to call, with the signals and pipes of one process.

    From `take_signals` to `restore_signals`, signals do nothing but end the loop's sleep and wait in ``signals``.
    """

    def __init__(self, signal_names: Iterable[str]) -> None:
        self.selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        self._signal_names = signal_names
        self._resumable: list[OutputPipe] = []
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.selector.register(self._reader, selectors.EVENT_READ, lambda: self._reader.recv(4096))

    def take_signals(self) -> None:
        asked = [getattr(signal, name) for name in self._signal_names]
        # One that was ignored from the start stays so: that is how nohup and a shell's & work.
        numbers = [number for number in asked if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, lambda got, _: self.signals.append(got)) for number in numbers}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def restore_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wake(self) -> None:
        """Ends the loop's sleep; may be called from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: the loop is about to wake anyway
            self._writer.send(b"\0")

    def add_pipe(self, pipe: OutputPipe) -> None:
        """Reads the pipe from now on; harmless the second time, and after its end."""
        if not pipe.ended and pipe.fileno() not in self.selector.get_map():
            self.selector.register(pipe, selectors.EVENT_READ, lambda: self._read(pipe))

    def resume_pipe(self, pipe: OutputPipe) -> None:
        """Reads a paused pipe again. Called on the console's thread."""
        self._resumable.append(pipe)
        self.wake()

    def turn_pipes(self, pipes: Iterable[OutputPipe]) -> None:
        """Does what is due for pipes in every turn of the loop."""
        while self._resumable:
            self.add_pipe(self._resumable.pop())
        now = time.monotonic()
        for pipe in pipes:
            pipe.tick(now)

    def _read(self, pipe: OutputPipe) -> None:
        if not pipe.read() or pipe.paused:
            self.selector.unregister(pipe)

    def close(self) -> None:
        self.selector.close()
        self._reader.close()
        self._writer.close()
