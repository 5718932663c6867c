"""What the kernel says of the ranks' processes, and of those that they have started, over the last seconds.

Nothing is read as long as the ranks get on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phalanx.status.rank_record import Vitals
from phalanx.system import procfs, tcp_bytes
from phalanx.system.procfs import ProcessFacts


@dataclass(frozen=True)
class Reading:
    """Of one process at one moment: sums since its start."""

    at: float
    facts: ProcessFacts
    moved: int
    """Bytes, with those of its connections."""


def read(pid: int, now: float, connections: Mapping[int, int]) -> Reading | None:
    """None when there is no such process. ``connections``: see `tcp_bytes`."""
    found = procfs.facts(pid)
    return None if found is None else Reading(now, found, found.moved + tcp_bytes.moved_by(pid, connections))


class ProcSampler:
    """Readings of all these processes, as far back as they are of use."""

    def __init__(self, window: float) -> None:
        """``window``: seconds."""
        self._window = window
        self._readings: dict[int, deque[Reading]] = {}
        self.families: dict[int, tuple[int, ...]] = {}
        """Of each rank's process, those below it."""

    def clear(self) -> None:
        self._readings.clear()
        self.families.clear()

    def look(self, pids: Collection[int], now: float) -> None:
        """One more reading of these processes and all below them."""
        self.families = procfs.families(pids)
        connections = tcp_bytes.moved_by_connection()
        everyone = [*pids, *(pid for family in self.families.values() for pid in family)]
        for pid in everyone:
            found = read(pid, now, connections)
            if found is not None:
                self._readings.setdefault(pid, deque()).append(found)
        for pid in set(self._readings) - set(everyone):
            del self._readings[pid]
        for readings in self._readings.values():
            while len(readings) > 2 and now - readings[1].at >= self._window:
                readings.popleft()

    @property
    def span(self) -> float:
        """Seconds between the first reading and the last."""
        return max((readings[-1].at - readings[0].at for readings in self._readings.values()), default=0.0)

    def vitals(self, pid: int) -> Vitals | None:
        """None when it has ended, or was never seen."""
        readings = self._readings.get(pid)
        if not readings or readings[-1].facts.state in "ZX":
            return None
        first, last = readings[0], readings[-1]
        seconds = max(last.at - first.at, 1e-3)
        waits_in = procfs.wchan(pid)
        return Vitals(
            pid=pid,
            state=last.facts.state,
            cpu=(last.facts.cpu - first.facts.cpu) / seconds,
            bytes_moved=(last.moved - first.moved) / seconds,
            faults=(last.facts.faults - first.facts.faults) / seconds,
            swapped=last.facts.swapped,
            resident=last.facts.resident,
            waits_in=waits_in,
            lock_holder=_lock_holder(pid, waits_in),
            waits_for_disk=_is_mostly("D", readings),
            wants_cpu=_is_mostly("R", readings),
        )


def _lock_holder(pid: int, waits_in: str) -> str:
    """Empty when it waits for no lock on a file; not every kernel says what it waits in."""
    may_wait = waits_in in ("", "0") or "lock" in waits_in
    holder = procfs.lock_holder(pid) if may_wait else None
    return "" if holder is None else f"pid {holder} ({procfs.command(holder)})"


def _is_mostly(state: str, readings: Collection[Reading]) -> bool:
    return 2 * sum(one.facts.state == state for one in readings) > len(readings)
