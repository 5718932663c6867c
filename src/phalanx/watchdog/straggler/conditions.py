"""The conditions under which a rank works: its share of the cores, its memory, its disk, and the machine's load."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass

from phalanx.messages import Count, Record
from phalanx.system import cgroups, procfs
from phalanx.system.procfs import ProcessFacts

_BUSY, _THROTTLED, _DISK, _FULL, _LOADED = 0.1, 0.01, 0.05, 0.9, 1.5
"""The least values that are reported."""


@dataclass(frozen=True)
class Look:
    """A sample of a rank's process and its machine."""

    at: float
    process: ProcessFacts
    cpu: float
    """CPU seconds, with all processes below it."""
    throttled: float
    """Seconds in which its control group, or one above it, had used up its quota."""


class Conditions(Record, frozen=True):
    """The conditions between two samples. Shares are of the time that has passed."""

    cpu: float
    """Cores in use: 1.5 is one and a half."""
    queued: float
    """The share in which it could have run, but had no core."""
    throttled: float
    """The share in which its control group had used up its quota."""
    disk_wait: float
    resident: Count
    """Bytes."""
    swapped: Count
    memory_used: float
    """The share of the machine's memory that is in use."""
    load: float
    """Processes that want to run, or wait for a disk: the average of a minute."""
    cores: Count

    def __str__(self) -> str:
        """Returns ``CPU share 48 %, throttled by its cgroup 31 % of the time``: the first always, the rest if large."""
        known = [
            (True, f"CPU share {self.cpu:.0%}"),
            (self.throttled >= _THROTTLED, f"throttled by its cgroup {self.throttled:.0%} of the time"),
            (self.queued >= _BUSY, f"waiting for a core {self.queued:.0%} of the time"),
            (self.disk_wait >= _DISK, f"waiting for a disk {self.disk_wait:.0%} of the time"),
            (self.swapped > 0, f"{self.swapped >> 20} MiB of it swapped out"),
            (self.memory_used >= _FULL, f"memory {self.memory_used:.0%} used"),
            (self.load >= _LOADED * self.cores, f"load {self.load:.1f} on {self.cores} cores"),
        ]
        return ", ".join(text for matters, text in known if matters).replace("%", " %")


def looks(pids: Collection[int]) -> dict[int, Look]:
    """Samples each of these processes that has not ended."""
    found = {}
    for pid, below in procfs.families(pids).items():
        process = procfs.facts(pid)
        if process is not None:
            cpu = process.cpu + sum(child.cpu for each in below if (child := procfs.facts(each)) is not None)
            found[pid] = Look(time.monotonic(), process, cpu, cgroups.throttled(procfs.cgroups(pid)))
    return found


def between(before: Look, after: Look) -> Conditions:
    seconds = max(after.at - before.at, 1e-3)

    def share(spent: float) -> float:
        return round(min(1.0, max(0.0, spent) / seconds), 3)

    first, last = before.process, after.process
    return Conditions(
        cpu=round(max(0.0, after.cpu - before.cpu) / seconds, 3),
        queued=share(last.queued - first.queued),
        throttled=share(after.throttled - before.throttled),
        disk_wait=share(last.disk_wait - first.disk_wait),
        resident=last.resident,
        swapped=last.swapped,
        memory_used=round(_memory_used(), 3),
        load=round(os.getloadavg()[0], 2),
        cores=cgroups.core_affinity(),
    )


def _memory_used() -> float:
    memory = procfs.memory()
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    return 1 - available / total if total else 0.0
