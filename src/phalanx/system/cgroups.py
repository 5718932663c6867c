"""The limits that control groups (of a container, of a systemd slice) set for a process, and the cores it may use.

Both versions of control groups are read. The launcher, the doctor and the benchmarks count cores here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx import system
from phalanx.system import procfs

ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 62
"""Version 1 has a number near 2**63 for no limit."""


@dataclass(frozen=True)
class Allowance:
    """Limits on memory and processes; None means that there is none."""

    memory: int | None = None
    memory_used: int = 0
    processes: int | None = None
    processes_used: int = 0


def allowance(root: Path = ROOT, membership: Path = procfs.OWN_CGROUPS) -> Allowance:
    """The tightest limits on this process: those of its group and of all groups above it."""
    memory, memory_used = _tightest(_memory_of(group) for group in binding("memory", root, membership))
    processes, processes_used = _tightest(
        (number(group / "pids.max"), number(group / "pids.current")) for group in binding("pids", root, membership)
    )
    return Allowance(memory, memory_used, processes, processes_used)


@dataclass(frozen=True)
class Cores:
    """The cores of this machine, and how many of them this process may use."""

    present: int
    allowed: int
    """Cores in this process's affinity."""
    quota: float | None
    """The tightest quota of its control groups, in cores; None means that there is none."""

    @property
    def usable(self) -> int:
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota)))


def cores(root: Path = ROOT, membership: Path = procfs.OWN_CGROUPS) -> Cores:
    quotas = [quota for group in binding("cpu", root, membership) if (quota := _quota(group)) is not None]
    return Cores(os.cpu_count() or 1, core_affinity(), min(quotas, default=None))


def usable_cores() -> int:
    return cores().usable


def core_affinity() -> int:
    """The number of cores that this process may run on; its control groups may allow less of their time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def throttled(membership: Path, root: Path = ROOT) -> float:
    """Seconds that a process has lost to a quota: the most of its group and those above it."""
    found = [counters(group / "cpu.stat") for group in binding("cpu", root, membership)]
    # The second name is of version 1.
    lost = (each.get("throttled_usec", 0) / 1e6 or each.get("throttled_time", 0) / 1e9 for each in found)
    return max(lost, default=0.0)


def binding(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The directories of the groups that may limit this process, from its own outwards, of both versions.

    Within a container its membership may name a path that only the host has.
    """
    rows = [line.split(":", 2) for line in system.text(membership).splitlines()]
    groups = {name: path for _, controllers, path in rows for name in controllers.split(",")}
    for base, path in ((root, groups.get("", "/")), (root / controller, groups.get(controller, "/"))):
        directory = base / path.lstrip("/")
        while True:
            if directory.is_dir():
                yield directory
            if directory == base:
                break
            directory = directory.parent


def _tightest(pairs: Iterable[tuple[int | None, int | None]]) -> tuple[int | None, int]:
    """The limit that leaves least, with what is used of it."""
    found = [(limit, used or 0) for limit, used in pairs if limit is not None and limit < NO_LIMIT]
    return min(found, key=lambda pair: pair[0] - pair[1]) if found else (None, 0)


def _memory_of(group: Path) -> tuple[int | None, int | None]:
    """The limit and the used bytes, without the file cache, which the kernel frees when memory is needed."""
    limit, used = number(group / "memory.max"), number(group / "memory.current")
    cached = "inactive_file"
    if limit is None and used is None:
        limit, used = number(group / "memory.limit_in_bytes"), number(group / "memory.usage_in_bytes")
        cached = "total_inactive_file"
    return limit, None if used is None else used - counters(group / "memory.stat").get(cached, 0)


def _quota(group: Path) -> float | None:
    words = system.text(group / "cpu.max").split()
    if len(words) == 2:
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    quota, period = number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def counters(path: Path) -> dict[str, int]:
    """The lines of a file such as ``memory.stat``; empty when it cannot be read."""
    return procfs.counters(system.text(path))


def number(path: Path) -> int | None:
    """The number in a file; None when there is no file, or another text such as ``max``."""
    text = system.text(path)
    return int(text) if text.lstrip("-").isdigit() else None
