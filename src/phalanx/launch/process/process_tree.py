"""Finds and ends every process of a run, whoever its parent is by now, so that none is left over.

The zygote is the subreaper of its descendants: a process whose parent died becomes its child, so the tree of a run
stays whole while the zygote lives. If the zygote is killed as well, the keeper finds the run's processes by the token
that all of them carry in their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from phalanx.system import procfs

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLEANUP_SECONDS = 1.0
_LONGEST_SECONDS = 10.0

# These outlive their parent on purpose, for a moment: they remove its shared-memory segments and semaphores.
_CLEANUP_COMMANDS = ("multiprocessing.resource_tracker", "torch_shm_manager")

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if hasattr(_libc, "prctl"):  # only Linux has it; elsewhere closed pipes must do
        _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Has the kernel send ``sig`` when the thread that forked us ends; sends it if that has ended already."""
    _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def outlive_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Makes every descendant whose parent dies a child of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def processes_of_run(token: str) -> set[int]:
    """The living processes that were started with this run's token, without this one."""
    mark = f"PHALANX_RUN_TOKEN={token}".encode()
    found = {pid for pid, stat in procfs.processes().items() if stat.lives and mark in procfs.environment(pid)}
    return found - {os.getpid()}


def end_all(find: Callable[[], Collection[int]], longest: float = _LONGEST_SECONDS) -> set[int]:
    """Kills what ``find`` finds until it finds nothing; returns what is left after ``longest`` seconds.

    Processes that clean up after others get a second to finish.
    """
    ended: set[int] = set()
    started = time.monotonic()
    give_up = started + longest  # a process inside a dead file system cannot be killed
    while True:
        living = set(find())
        killed = living
        if time.monotonic() < started + _CLEANUP_SECONDS:
            killed = {pid for pid in living if not any(name in procfs.command(pid) for name in _CLEANUP_COMMANDS)}
        for pid in killed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended |= killed
        reap_children()
        if not living or time.monotonic() > give_up:
            break
        # No event reports the death of another process's child; a killed process is gone in a few milliseconds.
        time.sleep(0.002)
    remove_segments(ended)
    return living


def is_gone(pid: int, seconds: float) -> bool:
    """Waits for the end of our parent ``pid``; returns whether it came within this time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return os.getppid() != pid or bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        os.close(pidfd)


def reap_children() -> dict[int, tuple[int, int]]:
    """Reaps every child that has ended; returns by pid its wait status and the most bytes it had in memory."""
    found = {}
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found[pid] = status, usage.ru_maxrss << 10


def remove_segments(pids: Collection[int]) -> None:
    """Removes the shared-memory files that torch had not yet unlinked when these processes were killed."""
    for pid in pids:
        for segment in Path("/dev/shm").glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):  # a pid of ours may be another's in another container
                if segment.stat().st_uid == os.getuid():
                    segment.unlink()
