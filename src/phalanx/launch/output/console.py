"""One terminal for many ranks: a thread writes their lines, one source after the other.

It gets whole lines, so lines never mix. A slow reader (a paused pager) blocks this thread and nothing else: a rank
that prints more than is read has to wait, the others do not.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import Protocol

_ERASE = b"\r\x1b[K"
_Piece = tuple[int, bytes, bool]
"""The descriptor, the data, and True if the data has to begin a line."""


class Source(Protocol):
    """A source of lines; it is called, on the console's thread, when all of its bytes are written."""

    def drained(self) -> None: ...


class Console:
    """Writes to standard output and standard error. A terminal also shows unfinished lines, for a while."""

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self.is_terminal = {out: os.isatty(out), err: os.isatty(err)}
        self.out, self.err = out, err
        self.colours = self.is_terminal[out] and self.is_terminal[err] and not os.environ.get("NO_COLOR")
        self._waiting: dict[Source, deque[_Piece]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._writing = False
        self._gone: set[int] = set()
        self._unfinished = {out: False, err: False}
        """The last line there has not ended yet; only a single rank may leave one so."""
        self._live: tuple[int, bytes] | None = None
        """The latest unfinished line, to be shown."""
        self._shown: int | None = None
        """The descriptor whose terminal shows an unfinished line now."""
        self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
        self._thread.start()

    def put(self, source: Source, fd: int, data: bytes, *, on_a_new_line: bool = False) -> None:
        with self._changed:
            self._waiting.setdefault(source, deque()).append((fd, data, on_a_new_line))
            self._changed.notify_all()

    def show_live(self, fd: int, line: bytes) -> None:
        """Shows an unfinished line on a terminal when nothing else is to be written; the next output erases it."""
        with self._changed:
            self._live = fd, line
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything is written. Returns False after ``timeout``."""
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
                self._changed.wait_for(lambda: self._waiting or self._live or self._closing)
                if not self._waiting and (self._live is None or self._closing):
                    return
                source, pieces = self._next()
                self._writing = True
            for fd, data, on_a_new_line in pieces:
                self._try_write(fd, b"\n" + data if on_a_new_line and self._unfinished[fd] else data)
            with self._changed:
                self._writing = False
                empty = source is not None and source not in self._waiting
                self._changed.notify_all()
            if source is not None and empty:
                source.drained()

    def _next(self) -> tuple[Source | None, list[_Piece]]:
        """Returns what to write now, and its source. Called with the lock."""
        erase: list[_Piece] = [(self._shown, _ERASE, False)] if self._shown is not None else []
        self._shown = None
        if not self._waiting:
            assert self._live is not None
            fd, line = self._live
            self._live = None
            self._shown = fd
            return None, [*erase, (fd, line, False)]
        source = next(iter(self._waiting))
        queue = self._waiting.pop(source)
        piece = queue.popleft()
        if queue:
            self._waiting[source] = queue  # behind the other sources
        return source, [*erase, piece]

    def _try_write(self, fd: int, data: bytes) -> None:
        self._unfinished[fd] = not data.endswith((b"\n", _ERASE)) and self._shown is None
        view = memoryview(data)
        while view and fd not in self._gone:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # another process that shares the descriptor has made it non-blocking
                select.select([], [fd], [])
            except OSError:
                self._gone.add(fd)  # nobody reads any more (`| head`, a closed terminal); the logs are still written
