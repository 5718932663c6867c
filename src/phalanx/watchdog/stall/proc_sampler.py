"""Samples what the kernel reports of the ranks' processes, and of those that they have started.

Nothing is read as long as the ranks make progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from phalanx.status.rank_record import Vitals
from phalanx.system import procfs, tcp_bytes
from phalanx.system.procfs import ProcessFacts
from phalanx.watchdog.stall.rank_activity import GPU_DRIVER


@dataclass(frozen=True)
class Reading:
    """A sample of one process: sums since its start."""

    at: float
    facts: ProcessFacts
    moved: int
    """Bytes read and written, with those of its connections."""


class ProcSampler:
    """The samples of the last seconds of all processes of the ranks."""

    def __init__(self, window: float) -> None:
        """``window``: how many seconds samples are kept."""
        self._window = window
        self._readings: dict[int, deque[Reading]] = {}
        self.families: dict[int, tuple[int, ...]] = {}
        """The processes below the process of each rank."""

    def clear(self) -> None:
        self._readings.clear()
        self.families.clear()

    def look(self, pids: Collection[int], now: float) -> None:
        """Samples these processes and all below them."""
        self.families = procfs.families(pids)
        connections = tcp_bytes.moved_by_connection()
        everyone = [*pids, *(pid for family in self.families.values() for pid in family)]
        for pid in everyone:
            facts = procfs.facts(pid)
            if facts is not None:
                moved = facts.moved + tcp_bytes.moved_by(pid, connections)
                self._readings.setdefault(pid, deque()).append(Reading(now, facts, moved))
        for pid in set(self._readings) - set(everyone):
            del self._readings[pid]
        for readings in self._readings.values():
            while len(readings) > 2 and now - readings[1].at >= self._window:
                readings.popleft()

    @property
    def span(self) -> float:
        """Seconds between the first sample and the last."""
        return max((readings[-1].at - readings[0].at for readings in self._readings.values()), default=0.0)

    def vitals(self, pid: int, is_on_gpu: bool = False) -> Vitals | None:
        """Returns the rates of a process; None when it has ended, or was never sampled."""
        readings = self._readings.get(pid)
        if not readings or readings[-1].facts.state in "ZX":
            return None
        first, last = readings[0], readings[-1]
        seconds = max(last.at - first.at, 1e-3)
        waits_in, cpu = procfs.wchan(pid), "main_cpu" if is_on_gpu else "cpu"  # NCCL's own threads spin
        return Vitals(
            pid=pid,
            state=last.facts.state,
            cpu=(getattr(last.facts, cpu) - getattr(first.facts, cpu)) / seconds,
            bytes_moved=(last.moved - first.moved) / seconds,
            faults=(last.facts.faults - first.facts.faults) / seconds,
            swapped=last.facts.swapped,
            resident=last.facts.resident,
            waits_in=waits_in,
            lock_holder=_lock_holder(pid, waits_in),
            waits_for_disk=_is_mostly("D", readings) and not waits_in.startswith(GPU_DRIVER),
            wants_cpu=_is_mostly("R", readings),
        )


def _lock_holder(pid: int, waits_in: str) -> str:
    """Returns the holder of the file lock that a process waits for; empty when it waits for none."""
    may_wait = waits_in in ("", "0") or "lock" in waits_in  # not every kernel reports what it waits in
    holder = procfs.lock_holder(pid) if may_wait else None
    return "" if holder is None else f"pid {holder} ({procfs.command(holder)})"


def _is_mostly(state: str, readings: Collection[Reading]) -> bool:
    return 2 * sum(one.facts.state == state for one in readings) > len(readings)
