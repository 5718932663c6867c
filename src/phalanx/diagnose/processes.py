"""What the kernel says of one process, in sums since its start: two looks tell what it did between them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from phalanx.diagnose import cgroups

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessFacts:
    """Of one process at one moment. What the kernel does not count is zero."""

    pid: int
    state: str
    """The kernel's letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended."""
    cpu: float
    """Seconds of all its threads, and of its children that have ended."""
    resident: int
    """Bytes."""
    swapped: int
    queued: float
    """Seconds in which its first thread could have run, but had no core."""
    throttled: float
    """Seconds in which its control group, or one above it, had used up its quota."""
    disk_wait: float
    """Seconds in which it waited for a disk."""
    moved: int
    """Bytes that it has read and written, from wherever."""
    faults: int
    """Pages that had to be brought from a disk."""


def facts(pid: int, proc: Path = Path("/proc")) -> ProcessFacts | None:
    """None when there is no such process."""
    home = proc / str(pid)
    # The command's name stands in parentheses and may hold spaces and parentheses itself.
    fields = _read(home / "stat").rpartition(")")[2].split()
    if not fields:
        return None
    queue = _read(home / "schedstat").split()
    traffic = _pairs(_read(home / "io"))
    return ProcessFacts(
        pid=pid,
        state=fields[0],
        cpu=sum(map(int, fields[11:15])) / _TICKS,
        resident=int(fields[21]) * _PAGE,
        swapped=int(_pairs(_read(home / "status")).get("VmSwap", "0").split()[0]) << 10,
        queued=int(queue[1]) / 1e9 if len(queue) == 3 else 0.0,
        throttled=cgroups.throttled(home / "cgroup"),
        disk_wait=int(fields[39]) / _TICKS,
        moved=int(traffic.get("rchar", 0)) + int(traffic.get("wchar", 0)),
        faults=int(fields[9]),
    )


def lock_holder(pid: int, locks: Path = Path("/proc/locks")) -> int | None:
    """The process that holds the lock on a file for which this one waits; None if it waits for none, or for a stranger.

    The kernel lists those that wait below the one that holds, with the same number and an arrow.
    """
    holder = None
    for line in _read(locks).splitlines():
        fields = line.split()[1:]
        if fields[:1] == ["->"]:
            if fields[4] == str(pid):
                return holder
        else:
            # 0 and -1: nobody that can be seen from here.
            holder = int(fields[3]) or None if fields[3].isdigit() else None
    return None


def where(pid: int, proc: Path = Path("/proc")) -> str:
    """Its pid, its state, and the function of the kernel that it waits in."""
    fields = _read(proc / str(pid) / "stat").rpartition(")")[2].split()
    if not fields:
        return f"pid {pid}, which has ended meanwhile"
    meaning = {"D": " (waits for a device or a file system)", "T": " (stopped)", "Z": " (ended)"}.get(fields[0], "")
    return f"pid {pid}, state {fields[0]}{meaning}, wchan {_read(proc / str(pid) / 'wchan').strip() or 'unknown'}"


def family(pid: int) -> list[int]:
    """The processes below it, children first."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop(0))
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    """A thread's children are in its own list."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in _read(path).split()]


def _pairs(text: str) -> dict[str, str]:
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _read(path: Path) -> str:
    """Empty when it is not there, or not ours to read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
