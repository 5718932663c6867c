"""The C++ stacks that torch's store prints when its server is gone: kept in the log, left out on the console.

Each survivor of a lost node would print 30 lines that say nothing more than the warning above them.
"""

from __future__ import annotations

import re

_FILE = b"TCPStore.cpp"
_WARNING = re.compile(rb"\[W\d+ .*TCPStore\.cpp:\d+\] \[c10d\] ")
_STACK = re.compile(rb"Exception raised from .*:$|frame #\d+: |<omitting python frames>$|$")


class StackFilter:
    """Drops torch's C++ stacks from one stream, whose lines may come in several pieces."""

    def __init__(self) -> None:
        self._is_within = False

    def __call__(self, lines: bytes) -> bytes:
        """``lines`` are whole, each with its newline."""
        if not self._is_within and _FILE not in lines:
            return lines
        return b"".join(line for line in lines.splitlines(keepends=True) if self._is_kept(line.rstrip(b"\n")))

    def _is_kept(self, line: bytes) -> bool:
        if self._is_within and _STACK.match(line):
            self._is_within = bool(line)  # an empty line is the stack's last
            return False
        self._is_within = _WARNING.search(line) is not None
        return True
