"""What a container, or a slice of systemd, allows its processes. Both versions of the kernel's control groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 1 << 62
"""Version 1 says "none" by a number near 2**63."""


@dataclass(frozen=True)
class Allowance:
    """None means that there is no limit."""

    cores: float | None = None
    memory: int | None = None
    memory_used: int = 0
    processes: int | None = None
    processes_used: int = 0


def allowance(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Allowance:
    """The tightest limits on this process: those of its group and of all groups above it."""
    memory, memory_used = _tightest(_memory_of(group) for group in binding("memory", root, membership))
    processes, processes_used = _tightest(
        (number(group / "pids.max"), number(group / "pids.current")) for group in binding("pids", root, membership)
    )
    quotas = [quota for group in binding("cpu", root, membership) if (quota := _quota(group)) is not None]
    return Allowance(min(quotas, default=None), memory, memory_used, processes, processes_used)


def throttled(membership: Path, root: Path = Path("/sys/fs/cgroup")) -> float:
    """Seconds that a process has lost to a quota: of its group and those above it, the one that has lost most."""
    return max((_throttled(read(group / "cpu.stat")) for group in binding("cpu", root, membership)), default=0.0)


def _throttled(statistics: str) -> float:
    found = re.search(r"^throttled_usec (\d+)$", statistics, re.MULTILINE)
    if found:
        return int(found[1]) / 1e6
    found = re.search(r"^throttled_time (\d+)$", statistics, re.MULTILINE)  # version 1
    return int(found[1]) / 1e9 if found else 0.0


def binding(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The directories of the groups that may bind this process, from its own outwards, of both versions.

    Within a container the path that its membership says may be one that only the host has.
    """
    rows = [line.split(":", 2) for line in read(membership).splitlines()]
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
    """Of limits, and what is used of them, the one that leaves least."""
    found = [(limit, used or 0) for limit, used in pairs if limit is not None and limit < NO_LIMIT]
    return min(found, key=lambda pair: pair[0] - pair[1]) if found else (None, 0)


def _memory_of(group: Path) -> tuple[int | None, int | None]:
    """Files that are kept in memory until somebody needs it are counted as used, but are not."""
    limit, used = number(group / "memory.max"), number(group / "memory.current")
    cached = re.search(r"^inactive_file (\d+)$", read(group / "memory.stat"), re.MULTILINE)
    if limit is None and used is None:
        limit, used = number(group / "memory.limit_in_bytes"), number(group / "memory.usage_in_bytes")
        cached = re.search(r"^total_inactive_file (\d+)$", read(group / "memory.stat"), re.MULTILINE)
    return limit, None if used is None else used - (int(cached[1]) if cached else 0)


def _quota(group: Path) -> float | None:
    """In cores."""
    words = read(group / "cpu.max").split()
    if len(words) == 2:
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    quota, period = number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def number(path: Path) -> int | None:
    """That stands alone in a file; None when there is no file, or another text such as ``max``."""
    text = read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def read(path: Path) -> str:
    """Empty when it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
