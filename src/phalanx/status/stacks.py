"""Where all threads of this process are, in faulthandler's words, with their names."""

from __future__ import annotations

import sys
import threading
from types import FrameType


def text_of_stacks() -> str:
    """But for the one that asks. The interpreter runs one at a time, so no stack changes while it is read."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        parts.append(f"Thread 0x{ident:016x} [{names.get(ident, '')}] (most recent call first):\n{_lines(frame)}\n")
    return "".join(parts)


def _lines(frame: FrameType | None) -> str:
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)
