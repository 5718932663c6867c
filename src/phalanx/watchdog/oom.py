"""Finds out if the kernel has killed a process for memory: by its counters, and by its log where that may be read.

Such a process ends by SIGKILL, like any other that is killed. But the kernel counts how many processes of each control
group it has killed, how often the group's limit was reached, and the same for the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from phalanx.system import cgroups, procfs

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's log has the pids of the machine; a container has others."""
_NEARLY_FULL = 0.98
_KILLED = re.compile(
    r"Killed process (?P<pid>\d+) .*?anon-rss:(?P<anon>\d+)kB, file-rss:(?P<file>\d+)kB"
    r"(?:, shmem-rss:(?P<shmem>\d+)kB)?"
)


@dataclass(frozen=True)
class Group:
    """The counters of a control group."""

    name: str
    limit: int | None
    kills: int | None
    """The number of its processes that the kernel has killed; None when it does not count them."""
    shortages: int
    """The number of times that its own limit was reached."""
    was_full: bool = False
    """True if it has used all of its limit at some time. For version 1, which does not always count shortages."""


@dataclass(frozen=True)
class Look:
    """The counters at one moment."""

    groups: tuple[Group, ...]
    """The group of this process first, then those around it that have a limit."""
    machine_kills: int
    """Counted only where no group counts."""
    machine_memory: int


@dataclass(frozen=True)
class Shortage:
    """Memory has run out, and the kernel has killed processes."""

    kills: int
    limit: int
    group: str
    """The control group; empty for the machine's own memory."""


class Counters:
    """The counters of the groups of this process, which its children are in too."""

    def __init__(self, root: Path = cgroups.ROOT, proc: Path = procfs.PROC) -> None:
        self._root, self._proc = root, proc
        self._memory = procfs.memory(proc).get("MemTotal", 0)
        found = [(group, self._group(group)) for group in cgroups.binding("memory", root, proc / "self/cgroup")]
        counting = [(directory, group) for directory, group in found if group.kills is not None]
        limiting = [directory for directory, group in counting[1:] if group.limit is not None]
        self._groups = (*(directory for directory, _ in counting[:1]), *limiting)

    def look(self) -> Look:
        """Reads the counters."""
        kills = 0 if self._groups else procfs.oom_kills(self._proc)
        return Look(tuple(self._group(directory) for directory in self._groups), kills, self._memory)

    def _group(self, directory: Path) -> Group:
        limit = cgroups.number(directory / "memory.max")
        events, peak = cgroups.counters(directory / "memory.events"), None
        kills, shortages = events.get("oom_kill"), events.get("oom")
        if not events:  # version 1, or none at all
            limit = cgroups.number(directory / "memory.limit_in_bytes")
            kills = cgroups.counters(directory / "memory.oom_control").get("oom_kill")
            shortages = cgroups.number(directory / "memory.failcnt")
            peak = cgroups.number(directory / "memory.max_usage_in_bytes")
        if limit is not None and limit >= cgroups.NO_LIMIT:
            limit = None
        inside = directory.relative_to(self._root).as_posix()
        name = "/" + ("" if inside == "." else inside.removeprefix("memory").lstrip("/"))
        was_full = limit is not None and peak is not None and peak >= _NEARLY_FULL * limit
        return Group(name, limit, kills, shortages or 0, was_full)


def shortage(before: Look, after: Look) -> Shortage | None:
    """Returns what has happened between two looks, by the counters.

    The innermost group that counts is the one that ranks belong to. Where no group counts, kills anywhere on the
    machine are taken, which may concern other processes. The limit is that of the innermost group that has reached its
    own; when none has, the machine's memory has run out.
    """
    pairs = list(zip(before.groups, after.groups, strict=True))
    kills = after.machine_kills - before.machine_kills
    if pairs:
        kills = (after.groups[0].kills or 0) - (before.groups[0].kills or 0)
    if kills <= 0:
        return None
    limited = [(old, new, new.limit) for old, new in pairs if new.limit is not None]
    short = [(new.name, limit) for old, new, limit in limited if new.shortages > old.shortages]
    for name, limit in short or [(new.name, limit) for _, new, limit in limited if new.was_full]:
        return Shortage(kills, limit, name)
    return Shortage(kills, after.machine_memory, "")


def killed_by_log(pids: Collection[int], log: Path = Path("/dev/kmsg"), namespace: str | None = None) -> dict[int, int]:
    """Returns those of these processes that the kernel's log reports as killed for memory, with their bytes in memory.

    Empty where the log cannot be read, or has the pids of another namespace.
    """
    if (procfs.pid_namespace() if namespace is None else namespace) != _FIRST_PID_NAMESPACE:
        return {}
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    found = {}
    try:
        for record in _records(fd):
            killed = _KILLED.search(record)
            if killed and int(killed["pid"]) in pids:
                kilobytes = sum(int(killed[kind] or 0) for kind in ("anon", "file", "shmem"))
                found[int(killed["pid"])] = kilobytes << 10
    finally:
        os.close(fd)
    return found


def _records(fd: int) -> list[str]:
    """Reads all records: one per read. A record that was overwritten meanwhile is an error of one read."""
    found = []
    while True:
        try:
            data = os.read(fd, 8192)
        except BrokenPipeError:
            continue
        except OSError:  # none left
            return found
        if not data:
            return found
        found += data.decode(errors="replace").splitlines()
