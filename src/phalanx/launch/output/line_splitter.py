"""The lines in the raw output of a program: whole, with a prefix, as a terminal would show them."""

from __future__ import annotations

import re

_LONGEST_LINE = 1 << 20
_TAIL_BYTES = 8192
# How tqdm draws a bar with a position: down some lines, over what is there, and up again.
_UP = b"\x1b[A"
_BAR_BELOW = re.compile(rb"\n+\r([^\n]*?)(?:\x1b\[A)+")
_MAYBE_BAR_BELOW = re.compile(rb"\n+(?:\r[^\n\r]*(?:\r[\x1b\[]*)?)?\Z")
_STORE_FILE = b"TCPStore.cpp"
_STORE_WARNING = re.compile(rb"\[W\d+ .*TCPStore\.cpp:\d+\] \[c10d\] ")
_STACK = re.compile(rb"Exception raised from .*:$|frame #\d+: |<omitting python frames>$|$")


class LineSplitter:
    """Splits the output of one stream into whole lines with a prefix. A carriage return overwrites the line."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = bytearray()
        self._has_bars_below = False
        self._without_stacks = StackFilter()

    def feed(self, data: bytes) -> bytes:
        """Returns the lines that ``data`` completes."""
        self._has_bars_below = self._has_bars_below or _UP in bytes(self._rest[-2:]) + data
        if self._has_bars_below:
            data = _without_bars_below(bytes(self._rest) + data)
            self._rest.clear()
        end = data.rfind(b"\n") + 1
        if self._has_bars_below and (drawn := _MAYBE_BAR_BELOW.search(data)):
            begin = data.rfind(b"\n", 0, drawn.start()) + 1
            if begin == drawn.start() or b"\r" in data[begin : drawn.start()]:
                end = begin  # below a bar or nothing: the line may not have ended
        if not end:
            self._rest += data
            return self._limited()
        lines = bytes(self._rest) + data[:end]
        self._rest = bytearray(data[end:])
        return self._whole(lines)

    def _whole(self, lines: bytes) -> bytes:
        """Returns the lines with the prefix; the last one ends with a newline."""
        if b"\r" in lines:
            lines = b"\n".join(_visible(line) for line in lines.split(b"\n"))
        lines = self._without_stacks(lines)
        if not lines:
            return b""
        return self._prefix + lines[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n"

    def _limited(self) -> bytes:
        if b"\r" in self._rest and b"\n" not in self._rest:
            is_over = b"\r" * self._rest.endswith(b"\r")
            # older states of the bar are of no use
            self._rest = bytearray(b"\r" + _visible(bytes(self._rest)) + is_over)
        if len(self._rest) < _LONGEST_LINE:
            return b""
        return self.finish()

    def unfinished(self) -> bytes:
        """Returns the current line so far, with the prefix; empty if there is none."""
        text = _visible(bytes(self._rest).rstrip(b"\n").rpartition(b"\n")[2])
        return self._prefix + text if text else b""

    @property
    def is_progress(self) -> bool:
        return b"\r" in self._rest

    def finish(self) -> bytes:
        """Returns the last line of a stream that ended without a newline."""
        lines = bytes(self._rest).rstrip(b"\r\n")
        self._rest.clear()
        return self._whole(lines + b"\n") if lines else b""


def _visible(line: bytes) -> bytes:
    """Returns what a terminal shows of a line with carriage returns: the last text that was written over it."""
    return next((part for part in reversed(line.replace(_UP, b"").split(b"\r")) if part), b"")


def _without_bars_below(data: bytes) -> bytes:
    """Turns bars below the current line into states of that line, like bars without a position."""
    return _BAR_BELOW.sub(rb"\r\1", data)


class Tail:
    """The last output of a rank, on both of its streams."""

    def __init__(self) -> None:
        self.data = b""

    def add(self, data: bytes) -> None:
        self.data = (self.data + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    @property
    def is_open(self) -> bool:
        """The last line has not ended yet."""
        return bool(self.data) and not self.data.endswith(b"\n")

    def lines(self, count: int) -> tuple[str, ...]:
        shown = (
            _visible(line).decode(errors="replace").rstrip()
            for line in StackFilter()(_without_bars_below(self.data)).split(b"\n")
        )
        return tuple([line for line in shown if line][-count:])


class StackFilter:
    """Drops the C++ stacks that torch's store prints when its server is lost; the log keeps them.

    Each survivor of a lost node would print 30 lines that add nothing to the warning above them.
    """

    def __init__(self) -> None:
        self._is_within = False

    def __call__(self, lines: bytes) -> bytes:
        if not self._is_within and _STORE_FILE not in lines:
            return lines
        return b"".join(line for line in lines.splitlines(keepends=True) if self._is_kept(line.rstrip(b"\n")))

    def _is_kept(self, line: bytes) -> bool:
        if self._is_within and _STACK.match(line):
            self._is_within = bool(line)  # an empty line is the stack's last
            return False
        self._is_within = _STORE_WARNING.search(line) is not None
        return True
