"""The output of the workers: from their pipes to a readable console and a log file for each rank.

A worker has two pipes (stdout, stderr). Every byte goes to ``rank-N.log`` first. For the console the output is split
into lines, which get the rank as a prefix if there are several ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx import run_files
from phalanx.launch.output.console import Console
from phalanx.launch.output.line_splitter import LineSplitter, Tail

_PIPE_SIZE = 1 << 18  # of two pipes a rank; more would soon meet the limit the kernel sets for a user
_READ_SIZE = 1 << 20
_QUOTA = 4 << 20  # bytes of one stream that may wait for the console before its rank has to wait
_LIVE_EVERY = 0.5
_PROGRESS_EVERY = 10.0
_COLOURS = (36, 33, 32, 35, 34, 31)


def rank_prefix(rank: int, world_size: int, coloured: bool, node: str | None = None) -> bytes:
    """Returns the prefix of a rank's lines; ``node`` is the name of its node if one console shows several."""
    text = f"[{node + ' ' if node else ''}rank {rank:>{len(str(world_size - 1))}}]"
    if coloured:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return text.encode() + b" "


class LogFile:
    """A log file that never stops the run: a full disk is reported once, and the console still gets the lines."""

    def __init__(self, path: Path, complain: Callable[[str], None], directory: Path | None = None) -> None:
        """``directory``: the run directory, if that is not the file's own."""
        self._path = path
        self._complain = complain
        self._fd: int | None = None
        try:
            self._fd = run_files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, directory)
        except OSError as error:
            complain(f"cannot write {path}: {error.strerror}. There is no log there; the run continues.")

    def write(self, data: bytes) -> None:
        if self._fd is None:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            LogFile.close(self)  # what FilteredLog still holds would fail again
            self._complain(f"cannot write {self._path}: {error.strerror}. The log ends here; the run continues.")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class FilteredLog(LogFile):
    """A log of the lines that contain one of ``texts``, with a prefix; the ranks of a node share the file."""

    def __init__(self, path: Path, complain: Callable[[str], None], texts: Sequence[str], prefix: bytes) -> None:
        super().__init__(path, complain)
        self._texts = [text.encode(errors="surrogateescape") for text in texts]
        self._prefix = prefix
        self._splitter = LineSplitter(b"")

    def write(self, data: bytes) -> None:
        self._keep(self._splitter.feed(data))

    def close(self) -> None:
        self._keep(self._splitter.finish())
        super().close()

    def _keep(self, lines: bytes) -> None:
        found = [line for line in lines.splitlines(keepends=True) if any(text in line for text in self._texts)]
        if found:
            super().write(b"".join(self._prefix + line for line in found))


@dataclass
class OutputRoute:
    """The destinations of one stream."""

    files: list[LogFile]
    tail: Tail
    console_fd: int | None
    """1, 2, or None for files only."""
    prefix: bytes | None
    """The prefix of each line; None for a single rank, whose output is passed on as it is."""


class OutputPipe:
    """The agent's side of one pipe."""

    def __init__(
        self,
        route: OutputRoute,
        console: Console,
        resume: Callable[[OutputPipe], None],
        splitter: LineSplitter | None = None,
    ) -> None:
        """``splitter``: instead of one with the route's prefix."""
        self._route, self._console, self._resume = route, console, resume
        self._splitter = splitter or (LineSplitter(route.prefix) if route.prefix is not None else None)
        self._queued = 0
        self._lock = threading.Lock()
        self._shown = (b"", 0.0)
        self.paused = self.ended = False
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        import fcntl

        with contextlib.suppress(OSError):  # beyond the user's limit: the default size does, a little slower
            fcntl.fcntl(self.writer, 1031, _PIPE_SIZE)  # F_SETPIPE_SZ

    def fileno(self) -> int:
        return self.reader

    def read(self) -> bool:
        """Passes on what is there. Returns False at the end. Sets `paused` when the console is too far behind."""
        try:
            data = os.read(self.reader, _READ_SIZE)
        except BlockingIOError:
            return True
        if not data:
            self._to_console(self._splitter.finish() if self._splitter else b"")
            self.ended = True
            return False
        for file in self._route.files:
            file.write(data)
        self._route.tail.add(data)
        self._to_console(self._splitter.feed(data) if self._splitter else data)
        return True

    def _to_console(self, data: bytes) -> None:
        if not data or self._route.console_fd is None:
            return
        with self._lock:
            self._queued += len(data)
            self.paused = self._queued > _QUOTA
        self._console.put(self, self._route.console_fd, data)

    def drained(self) -> None:
        """Called on the console's thread when all is written."""
        with self._lock:
            self._queued = 0
            was_paused, self.paused = self.paused, False
        if was_paused:
            self._resume(self)

    def tick(self, now: float) -> None:
        """Shows an unfinished line: live on a terminal (a prompt, a bar), otherwise a bar every ten seconds."""
        if self._splitter is None or self._route.console_fd is None:
            return
        line = self._splitter.unfinished()
        shown, when = self._shown
        if not line or line == shown:
            return
        if self._console.is_terminal[self._route.console_fd]:
            if now - when >= _LIVE_EVERY:
                self._shown = line, now
                self._console.show_live(self._route.console_fd, line)
        elif self._splitter.is_progress and now - when >= _PROGRESS_EVERY:
            self._shown = line, now
            if when:  # the first state of a bar is not worth a line
                self._to_console(line + b"\n")

    def close_writer(self) -> None:
        """Closes the end that the worker has got."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        self.close_writer()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1
