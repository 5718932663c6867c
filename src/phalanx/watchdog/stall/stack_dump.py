"""Gets the Python stacks of processes that make no progress.

A rank's recorder writes the stacks of all threads on request. If it cannot, because the interpreter is not free, or
there is no recorder, as in the workers of a DataLoader, a signal makes the main thread write its own stack. A process
that does not catch the signal would be killed by it, so that is checked first. Last comes py-spy, if it is installed:
for processes that are stopped, or not ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from phalanx import run_files
from phalanx.status import layout, reading, stack_parser
from phalanx.status.stack_parser import Thread
from phalanx.system import procfs

_MOST_AT_ONCE = 16
_ANSWER = 0.5
_LONGEST_ANSWER = 1.0
_SETTLED = 0.05
_LONGEST_PY_SPY = 3.0
_LONGEST_LOOK = 10.0


@dataclass(frozen=True)
class Wanted:
    """A rank's process, and those below it whose stacks are wanted."""

    pid: int
    children: Sequence[int]
    page: Path
    file: Path
    """The file to which all of these write their stacks."""


def stacks_of(wanted: Sequence[Wanted], deadline: float) -> dict[int, tuple[Thread, ...]]:
    """Returns the stacks by pid.

    The processes of one rank share a file, so they are asked one after the other; the ranks are asked all at once.
    """
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(wanted) or 1)) as pool:
        found = dict(zip((one.pid for one in wanted), pool.map(_by_recorder, wanted), strict=True))
    queues = {one: [pid for pid in (one.pid, *one.children) if not found.get(pid)] for one in wanted}
    while any(queues.values()) and time.monotonic() < deadline:
        found |= _by_signal({queue.pop(0): one.file for one, queue in queues.items() if queue})
    for one in wanted:
        for pid in (one.pid, *one.children):
            if not found.get(pid) and time.monotonic() < deadline:
                found[pid] = _by_py_spy(pid)
    return {pid: stack_parser.with_sources(threads) for pid, threads in found.items()}


def of_ranks(pids: Mapping[int, int], directory: Path) -> dict[int, tuple[Thread, ...]]:
    """Returns the stacks of ranks with these processes, for a command that looks at a run from outside."""
    wanted = [
        Wanted(pid, (), layout.status_path(directory, rank), layout.stacks_path(directory, rank))
        for rank, pid in pids.items()
    ]
    found = stacks_of(wanted, time.monotonic() + _LONGEST_LOOK)
    return {rank: found.get(pid, ()) for rank, pid in pids.items()}


# ---- by the rank itself


def _by_recorder(one: Wanted) -> tuple[Thread, ...]:
    begin = _size(one.file)
    if not _is_running(one.pid):
        return ()
    try:
        has_answered = reading.ask(one.page, _ANSWER, layout.STACKS_ASKED)
    except (OSError, ValueError):  # it has no page, or an empty one
        return ()
    return stack_parser.from_faulthandler(_tail(one.file, begin)) if has_answered else ()


# ---- by a signal


def _by_signal(asked: Mapping[int, Path]) -> dict[int, tuple[Thread, ...]]:
    begins = {pid: _size(file) for pid, file in asked.items()}
    answers = {pid: file for pid, file in asked.items() if _send_signal(pid)}
    sizes, settled_at = dict(begins), dict.fromkeys(answers, 0.0)
    deadline = time.monotonic() + _LONGEST_ANSWER
    # A file has no event for the end of a dump, which is written within a few milliseconds.
    while time.monotonic() < deadline and any(not _is_settled(moment) for moment in settled_at.values()):
        time.sleep(_SETTLED / 5)
        for pid, file in answers.items():
            size = _size(file)
            if size != sizes[pid]:
                sizes[pid], settled_at[pid] = size, time.monotonic()
    return {pid: stack_parser.from_faulthandler(_tail(file, begins[pid])) for pid, file in answers.items()}


def _is_settled(moment: float) -> bool:
    """True if the file has grown, and then not for a while."""
    return moment > 0 and time.monotonic() - moment > _SETTLED


def _send_signal(pid: int) -> bool:
    """Sends the signal, and returns True if that has worked."""
    try:
        handle = os.pidfd_open(pid)  # it stays the same process, even if its pid is reused
    except OSError:
        return False
    try:
        if not _catches_signal(pid):
            return False
        signal.pidfd_send_signal(handle, layout.STACK_SIGNAL)
    except OSError:  # another user's, or it has just ended
        return False
    finally:
        os.close(handle)
    return True


def _catches_signal(pid: int) -> bool:
    """True if a process catches the signal, and runs: a stopped one would answer too late."""
    caught = int(procfs.status(pid).get("SigCgt", "0"), 16)
    return bool(caught >> (layout.STACK_SIGNAL - 1) & 1) and _is_running(pid)


def _is_running(pid: int) -> bool:
    return procfs.status(pid).get("State", "")[:1] not in ("", "T", "t", "Z")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _tail(file: Path, begin: int) -> str:
    try:
        return run_files.read(file, begin).decode(errors="replace")
    except OSError:
        return ""


# ---- by py-spy


def _by_py_spy(pid: int) -> tuple[Thread, ...]:
    """Returns the stacks that py-spy reads from the memory of a process, without stopping it."""
    program = _py_spy()
    if program is None or procfs.stat(pid) is None:
        return ()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LONGEST_PY_SPY,
            check=True,
        )
        return stack_parser.from_py_spy(done.stdout.decode(errors="replace"))
    return ()


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")
