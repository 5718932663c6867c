"""Gets the Python stacks of processes that stand still: by a signal, and where that is not answered by py-spy.

Every rank writes its stacks to a file of its own when it is told to, and so do the processes that it has forked. A
process that does not catch the signal would be killed by it, so that is looked at first.
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
from pathlib import Path

from phalanx import status
from phalanx.diagnose import stacks
from phalanx.diagnose.stacks import Thread
from phalanx.launch import vitals

_LONGEST_ANSWER = 1.0
_SETTLED = 0.05
_LONGEST_PY_SPY = 3.0


def stacks_of(subjects: Mapping[int, tuple[Path, Sequence[int]]], deadline: float) -> dict[int, tuple[Thread, ...]]:
    """``subjects``: of each rank's process the file of its stacks, and the processes below it that matter.

    The processes of one rank share a file, so they are asked one after the other; the ranks at the same time.
    """
    found: dict[int, tuple[Thread, ...]] = {}
    queues = {root: [root, *children] for root, (_, children) in subjects.items()}
    while any(queues.values()) and time.monotonic() < deadline:
        asked = {queue.pop(0): subjects[root][0] for root, queue in queues.items() if queue}
        found |= _by_signal(asked)
    for root, (_, children) in subjects.items():
        for pid in (root, *children):
            if not found.get(pid) and time.monotonic() < deadline:
                found[pid] = _by_py_spy(pid)
    return {pid: stacks.with_sources(threads) for pid, threads in found.items()}


# ---- by a signal


def _by_signal(asked: Mapping[int, Path]) -> dict[int, tuple[Thread, ...]]:
    begins = {pid: _size(file) for pid, file in asked.items()}
    answers = {pid: file for pid, file in asked.items() if _tell(pid)}
    sizes, settled_at = dict(begins), dict.fromkeys(answers, 0.0)
    deadline = time.monotonic() + _LONGEST_ANSWER
    # A file has no event that says "this was all"; a dump is written within a few milliseconds.
    while time.monotonic() < deadline and any(not _is_settled(moment) for moment in settled_at.values()):
        time.sleep(_SETTLED / 5)
        for pid, file in answers.items():
            size = _size(file)
            if size != sizes[pid]:
                sizes[pid], settled_at[pid] = size, time.monotonic()
    return {pid: stacks.from_faulthandler(_tail(file, begins[pid])) for pid, file in answers.items()}


def _is_settled(moment: float) -> bool:
    """It has grown, and then not for a while."""
    return moment > 0 and time.monotonic() - moment > _SETTLED


def _tell(pid: int) -> bool:
    """Whether the signal has been sent."""
    try:
        handle = os.pidfd_open(pid)  # from here on it cannot become another process
    except OSError:
        return False
    try:
        if not _listens(pid):
            return False
        signal.pidfd_send_signal(handle, status.STACK_SIGNAL)
    except OSError:  # another user's, or it has just ended
        return False
    finally:
        os.close(handle)
    return True


def _listens(pid: int) -> bool:
    """Whether it catches the signal, and runs: one that is stopped would answer after its return, to nobody."""
    caught = int(vitals.field_of(pid, "SigCgt") or "0", 16)
    return bool(caught >> (status.STACK_SIGNAL - 1) & 1) and vitals.field_of(pid, "State")[:1] not in ("T", "t", "Z")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _tail(file: Path, begin: int) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(begin)
            return opened.read().decode(errors="replace")
    except OSError:
        return ""


# ---- by py-spy


def _by_py_spy(pid: int) -> tuple[Thread, ...]:
    """It reads the memory of a process that need not do anything for it, nor is it stopped for that."""
    program = _py_spy()
    if program is None or not Path(f"/proc/{pid}").exists():
        return ()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LONGEST_PY_SPY,
            check=True,
        )
        return stacks.from_py_spy(done.stdout.decode(errors="replace"))
    return ()


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")
