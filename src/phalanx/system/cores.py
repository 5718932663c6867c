"""The cores of this machine that this process may use. The launcher, the doctor and the benchmarks count them here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from phalanx.system import cgroups, procfs


@dataclass(frozen=True)
class Cores:
    present: int
    allowed: int
    """By this process's affinity."""
    quota: float | None
    """By its control groups, in cores; None means that there is no limit."""

    @property
    def usable(self) -> int:
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota)))


def count(root: Path = cgroups.ROOT, membership: Path = procfs.OWN_CGROUPS) -> Cores:
    return Cores(os.cpu_count() or 1, affinity(), cgroups.cpu_quota(root, membership))


def affinity() -> int:
    """The number of cores that this process may run on; its control groups may allow less of their time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable() -> int:
    return count().usable
