"""Nothing is left over: finding and ending every process of a run, whoever its parent is by now.

The zygote is the subreaper of its descendants: a process whose parent died becomes its child, so the tree of a run
never falls apart while the zygote lives. Should the zygote be killed as well, the keeper finds the run's processes
by the token that all of them carry in their environment.
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
_TIDY_SECONDS = 1.0
_LONGEST_SECONDS = 10.0

# These outlive their parent on purpose, for a moment: they remove its shared-memory segments and semaphores.
_TIDY_COMMANDS = ("multiprocessing.resource_tracker", "torch_shm_manager")

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if hasattr(_libc, "prctl"):  # Linux; elsewhere the pipes alone must do
        _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """The kernel sends ``sig`` when the thread that forked us ends. A parent that is gone already counts too."""
    _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def outlive_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes our child."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def bearers(token: str) -> set[int]:
    """Every living process that was started with this run's token, but not this one."""
    mark = f"PHALANX_RUN_TOKEN={token}".encode()
    found = {pid for pid, stat in procfs.processes().items() if stat.lives and mark in procfs.environment(pid)}
    return found - {os.getpid()}


def end_all(find: Callable[[], Collection[int]], longest: float = _LONGEST_SECONDS) -> set[int]:
    """Kills what ``find`` finds until it finds nothing; returns what is left after ``longest`` seconds.

    Tidying helpers get a moment to finish.
    """
    ended: set[int] = set()
    patience = time.monotonic() + _TIDY_SECONDS
    give_up = time.monotonic() + longest  # a process inside a dead file system cannot be killed
    while True:
        living = set(find())
        tidying = {pid for pid in living if any(name in procfs.command(pid) for name in _TIDY_COMMANDS)}
        prey = living - tidying if time.monotonic() < patience else living
        for pid in prey:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended |= prey
        reap_children()
        if not living or time.monotonic() > give_up:
            break
        # No event tells of the death of somebody else's child; a killed process is gone within a few milliseconds.
        time.sleep(0.002)
    remove_segments(ended)
    return living


def is_gone(pid: int, seconds: float) -> bool:
    """Whether our parent ``pid`` has ended within this time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return os.getppid() != pid or bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        os.close(pidfd)


def reap_children() -> dict[int, tuple[int, int]]:
    """Collects every child that has ended: pid to wait status, and the bytes that it had in memory at most."""
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
    """Shared-memory files that torch had created and not yet unlinked when its process was killed."""
    for pid in pids:
        for segment in Path("/dev/shm").glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):  # a pid of ours may be another's in another container
                if segment.stat().st_uid == os.getuid():
                    segment.unlink()
