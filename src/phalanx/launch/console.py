"""One terminal for many ranks: a thread that writes what the pumps hand over, a turn for each in order.

Every hand-over is whole lines, so lines never mix. A reader that is slow (a paused pager) blocks this thread and
nothing else; a rank that prints more than is read has to wait, the others do not.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Protocol

_ERASE = b"\r\x1b[K"


class Source(Protocol):
    """Whoever hands lines over; it is called back, on the console's thread, when all of its bytes are written."""

    def drained(self) -> None: ...


class Console:
    """Writes to standard output and standard error. ``live`` terminals also show unfinished lines, for a while."""

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self.is_terminal = {out: os.isatty(out), err: os.isatty(err)}
        self.out, self.err = out, err
        self.colours = self.is_terminal[out] and self.is_terminal[err] and not os.environ.get("NO_COLOR")
        self._waiting: dict[Source, deque[tuple[int, bytes]]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._writing = False
        self._gone = False
        self._live_fd: int | None = None
        self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
        self._thread.start()

    def put(self, source: Source, fd: int, data: bytes) -> None:
        with self._changed:
            self._waiting.setdefault(source, deque()).append((fd, data))
            self._changed.notify_all()

    def show_live(self, fd: int, line: bytes) -> None:
        """Shows an unfinished line on a terminal; the next output erases it. Skipped when there is more urgent work."""
        with self._changed:
            if self._waiting or self._writing or self._gone:
                return
            self._live_fd = fd
            self._try_write(fd, _ERASE + line)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything handed over is written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout)

    def close(self, timeout: float | None = None) -> None:
        self.flush(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                source = next(iter(self._waiting))
                pieces = self._waiting.pop(source)
                fd, data = pieces.popleft()
                if pieces:
                    self._waiting[source] = pieces  # behind the others: a turn for each
                self._writing = True
                if self._live_fd is not None:
                    self._try_write(self._live_fd, _ERASE)
                    self._live_fd = None
            self._try_write(fd, data)
            with self._changed:
                self._writing = False
                empty = source not in self._waiting
                self._changed.notify_all()
            if empty:
                source.drained()

    def _try_write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and not self._gone:
                view = view[os.write(fd, view) :]
        except OSError:
            self._gone = True  # nobody reads any more (`| head`, a closed terminal); the logs go on
