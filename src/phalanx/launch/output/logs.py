"""From the pipes of the workers to a readable console and a file for each rank.

Two pipes a worker (stdout, stderr). Every byte goes to ``rank-N.log`` first; what goes to the console is cut into
lines and gets the rank in front when there is more than one.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx import run_files
from phalanx.launch.output.console import Console
from phalanx.launch.output.cpp_stacks import StackFilter

_PIPE_SIZE = 1 << 18  # of two pipes a rank; more would soon meet the limit the kernel sets for a user
_READ_SIZE = 1 << 20
_QUOTA = 4 << 20  # bytes of one stream that may wait for the console before its rank has to wait
_LONGEST_LINE = 1 << 20
_TAIL = 8192
_LIVE_EVERY = 0.5
_PROGRESS_EVERY = 10.0
_COLOURS = (36, 33, 32, 35, 34, 31)
# How tqdm draws a bar with a position: down some lines, over what is there, and up again.
_UP = b"\x1b[A"
_BAR_BELOW = re.compile(rb"\n+\r([^\n]*?)(?:\x1b\[A)+")
_MAYBE_BAR_BELOW = re.compile(rb"\n+(?:\r[^\n\r]*(?:\r[\x1b\[]*)?)?\Z")


def rank_prefix(rank: int, world_size: int, coloured: bool, node: str | None = None) -> bytes:
    """``node``: the name of its node, where one console shows several."""
    text = f"[{node + ' ' if node else ''}rank {rank:>{len(str(world_size - 1))}}]"
    if coloured:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return text.encode() + b" "


class LineSplitter:
    """Turns arbitrary pieces of output into whole lines with a prefix. A carriage return overwrites the line."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = bytearray()
        self._has_bars_below = False
        self._without_stacks = StackFilter()

    def feed(self, data: bytes) -> bytes:
        """The lines that ``data`` completes."""
        self._has_bars_below = self._has_bars_below or _UP in bytes(self._rest[-2:]) + data
        if self._has_bars_below:
            data = _flat(bytes(self._rest) + data)
            self._rest.clear()
        end = data.rfind(b"\n") + 1
        if self._has_bars_below and (drawn := _MAYBE_BAR_BELOW.search(data)):
            begin = data.rfind(b"\n", 0, drawn.start()) + 1
            if begin == drawn.start() or b"\r" in data[begin : drawn.start()]:
                end = begin  # below a bar or nothing: the line may not have ended
        if not end:
            self._rest += data
            return self._overlong()
        lines = bytes(self._rest) + data[:end]
        self._rest = bytearray(data[end:])
        return self._whole(lines)

    def _whole(self, lines: bytes) -> bytes:
        """With the prefix. ``lines`` ends with a newline."""
        if b"\r" in lines:
            lines = b"\n".join(_after_returns(line) for line in lines.split(b"\n"))
        lines = self._without_stacks(lines)
        if not lines:
            return b""
        return self._prefix + lines[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n"

    def _overlong(self) -> bytes:
        if b"\r" in self._rest and b"\n" not in self._rest:
            is_over = b"\r" * self._rest.endswith(b"\r")
            # older states of the bar are of no use
            self._rest = bytearray(b"\r" + _after_returns(bytes(self._rest)) + is_over)
        if len(self._rest) < _LONGEST_LINE:
            return b""
        return self.finish()

    def unfinished(self) -> bytes:
        """What stands on the current line so far, with the prefix; empty when there is nothing."""
        text = _after_returns(bytes(self._rest).rstrip(b"\n").rpartition(b"\n")[2])
        return self._prefix + text if text else b""

    @property
    def is_progress(self) -> bool:
        return b"\r" in self._rest

    def finish(self) -> bytes:
        """The last line of a stream that ended without a newline."""
        lines = bytes(self._rest).rstrip(b"\r\n")
        self._rest.clear()
        return self._whole(lines + b"\n") if lines else b""


def _after_returns(line: bytes) -> bytes:
    """What a terminal shows of a line with carriage returns: the last text that was written over it."""
    return next((part for part in reversed(line.replace(_UP, b"").split(b"\r")) if part), b"")


def _flat(data: bytes) -> bytes:
    """Bars below the current line as states of that line, as bars without a position are."""
    return _BAR_BELOW.sub(rb"\r\1", data)


class LogFile:
    """A file for each rank that never stops the run: a full disk is said once and the console goes on."""

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
            LogFile.close(self)  # what a subclass still holds would fail again
            self._complain(f"cannot write {self._path}: {error.strerror}. The log ends here; the run continues.")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class FilteredLog(LogFile):
    """The lines of one stream that have one of ``texts``, with a prefix; the ranks of a node share the file."""

    def __init__(self, path: Path, complain: Callable[[str], None], texts: Sequence[str], prefix: bytes) -> None:
        super().__init__(path, complain)
        self._texts = [text.encode(errors="surrogateescape") for text in texts]
        self._prefix = prefix
        self._cutter = LineSplitter(b"")

    def write(self, data: bytes) -> None:
        self._keep(self._cutter.feed(data))

    def close(self) -> None:
        self._keep(self._cutter.finish())
        super().close()

    def _keep(self, lines: bytes) -> None:
        found = [line for line in lines.splitlines(keepends=True) if any(text in line for text in self._texts)]
        if found:
            super().write(b"".join(self._prefix + line for line in found))


class Tail:
    """The last bytes that a rank printed, on both of its streams."""

    def __init__(self) -> None:
        self.data = b""

    def add(self, data: bytes) -> None:
        self.data = (self.data + data[-_TAIL:])[-_TAIL:]

    @property
    def is_open(self) -> bool:
        """The last line has no end yet."""
        return bool(self.data) and not self.data.endswith(b"\n")

    def lines(self, count: int) -> tuple[str, ...]:
        shown = (
            _after_returns(line).decode(errors="replace").rstrip()
            for line in StackFilter()(_flat(self.data)).split(b"\n")
        )
        return tuple([line for line in shown if line][-count:])


@dataclass
class OutputRoute:
    """Where the output of one stream goes."""

    files: list[LogFile]
    tail: Tail
    console_fd: int | None
    """1, 2, or None for files only."""
    prefix: bytes | None
    """None passes everything through as it is: one rank, nothing to tell apart."""


class OutputPipe:
    """The agent's side of one pipe."""

    def __init__(self, route: OutputRoute, console: Console, resume: Callable[[OutputPipe], None]) -> None:
        self._route = route
        self._console = console
        self._resume = resume
        self._cutter = LineSplitter(route.prefix) if route.prefix is not None else None
        self._queued = 0
        self._lock = threading.Lock()
        self._shown = (b"", 0.0)
        self.paused = False
        self.ended = False
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        import fcntl

        with contextlib.suppress(OSError):  # beyond the user's limit: the default size does, a little slower
            fcntl.fcntl(self.writer, 1031, _PIPE_SIZE)  # F_SETPIPE_SZ

    def fileno(self) -> int:
        return self.reader

    def read(self) -> bool:
        """Moves what is there; False at the end of the stream. Sets `paused` when the console is too far behind."""
        try:
            data = os.read(self.reader, _READ_SIZE)
        except BlockingIOError:
            return True
        if not data:
            self._to_console(self._cutter.finish() if self._cutter else b"")
            self.ended = True
            return False
        for file in self._route.files:
            file.write(data)
        self._route.tail.add(data)
        self._to_console(self._cutter.feed(data) if self._cutter else data)
        return True

    def _to_console(self, data: bytes) -> None:
        if not data or self._route.console_fd is None:
            return
        with self._lock:
            self._queued += len(data)
            self.paused = self._queued > _QUOTA
        self._console.put(self, self._route.console_fd, data)

    def drained(self) -> None:
        """Called on the console's thread."""
        with self._lock:
            self._queued = 0
            was_paused, self.paused = self.paused, False
        if was_paused:
            self._resume(self)

    def tick(self, now: float) -> None:
        """Shows a line that is not finished: live on a terminal (a prompt, a bar), else a bar once in a while."""
        if self._cutter is None or self._route.console_fd is None:
            return
        line = self._cutter.unfinished()
        shown, when = self._shown
        if not line or line == shown:
            return
        if self._console.is_terminal[self._route.console_fd]:
            if now - when >= _LIVE_EVERY:
                self._shown = line, now
                self._console.show_live(self._route.console_fd, line)
        elif self._cutter.is_progress and now - when >= _PROGRESS_EVERY:
            self._shown = line, now
            if when:  # the first state of a bar is not worth a line
                self._to_console(line + b"\n")

    def close_writer(self) -> None:
        """After the worker has it."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        self.close_writer()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1
