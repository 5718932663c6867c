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

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TIDY_SECONDS = 1.0
_LONGEST_SECONDS = 10.0

# These outlive their parent on purpose, for a moment: they remove its shared-memory segments and semaphores.
_TIDY_COMMANDS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")

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


def _processes() -> dict[int, tuple[int, bool]]:
    """pid to parent's pid, and whether it lives. Zombies are listed too: their children still hang below them."""
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 (a thousand Path objects cost more than the reading)
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:  # noqa: PTH123
                # The command's name stands in parentheses and may hold spaces and parentheses itself.
                fields = stat.read().rpartition(b")")[2].split()
                state, parent, threads = fields[0], int(fields[1]), int(fields[17])
                # The main thread of a killed process may be a zombie while its other threads are still dying.
                found[int(entry)] = parent, state not in (b"Z", b"X") or threads > 1
    return found


def descendants(root: int) -> set[int]:
    """Every living process below ``root``."""
    return set(families([root])[root])


def families(roots: Collection[int]) -> dict[int, tuple[int, ...]]:
    """The living processes below each of these, parents before their children."""
    processes = _processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, list[int]] = {}
    for root in roots:
        found[root] = [root]
        for pid in found[root]:  # it grows meanwhile
            found[root] += sorted(children.get(pid, ()))
    return {root: tuple(pid for pid in below[1:] if processes[pid][1]) for root, below in found.items()}


def living(pids: Collection[int]) -> set[int]:
    """Those of them that have not ended."""
    found = _processes() if pids else {}
    return {pid for pid in pids if found.get(pid, (0, False))[1]}


def bearers(token: str) -> set[int]:
    """Every living process that was started with this run's token, but not this one."""
    mark = f"PHALANX_RUN_TOKEN={token}".encode()
    found = set()
    for pid, (_, lives) in _processes().items():
        with contextlib.suppress(OSError):
            if lives and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
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
        tidying = {pid for pid in living if _tidies_up(pid)}
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


def _tidies_up(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _TIDY_COMMANDS)


def state(pid: int) -> str:
    """The kernel's letter for it; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


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
