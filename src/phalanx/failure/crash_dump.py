"""Parses what faulthandler prints when native code crashes: the Python stack, and from Python 3.14 on the C stack."""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.events import Frame, NativeFrame
from phalanx.source_lines import LAUNCHER, source_of

_PYTHON_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_NATIVE_LINE = re.compile(r'^  Binary file "(?P<library>.*)", at (?P<symbol>.*) \[0x[0-9a-f]+\]$')
_DUMP = re.compile(
    r'Fatal Python error: |(Current t|T)hread 0x|  File ".*", line \d+ in |  Binary file |  \.\.\.$'
    r"|  <(no Python frame|cannot get C stack on this system)>|Current thread's C stack trace|Extension modules: "
)
_NATIVE = "Current thread's C stack trace"


def python_frames(report: str) -> tuple[Frame, ...]:
    """Returns the stack of the thread that crashed, innermost first, without the launcher's part.

    If that is a thread of C++, which Python does not know, it is the stack of the main thread, which is printed last.
    """
    current = report.partition("Current thread 0x")[2] or report.rpartition("Thread 0x")[2]
    frames = []
    for line in current.splitlines()[1:]:
        found = _PYTHON_LINE.match(line)
        if not found or found["file"].startswith(LAUNCHER):
            break
        number = int(found["line"])
        frames.append(Frame(found["file"], number, found["function"], source_of(found["file"], number)))
    return tuple(frames)


def without_dump(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the lines of a rank without those of faulthandler."""
    return tuple(line for line in lines if not _DUMP.match(line))


def native_frames(report: str) -> tuple[NativeFrame, ...]:
    """Returns the C stack, if there is one."""
    frames = []
    for line in report.partition(_NATIVE)[2].splitlines()[1:]:
        found = _NATIVE_LINE.match(line)
        if not found:
            break
        frames.append(NativeFrame(found["library"], found["symbol"]))
    return tuple(frames)
