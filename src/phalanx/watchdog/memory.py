"""Watches the memory of the ranks of this node: once a second while they live, and when one has failed.

Later it is too late: the memory of a process ends with it, and /dev/shm has room again.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx import events, messages
from phalanx.system import procfs
from phalanx.watchdog import oom

if TYPE_CHECKING:
    from phalanx.status.rank_record import WatchedRank

_EVERY = 1.0
_REMEMBERED = 10
"""The number of samples. A process with much memory may take seconds to end after the kernel has killed it."""
_LOADER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: (?:Killed|Bus error)|exited)"
)


@dataclass(frozen=True)
class _FailureSnapshot:
    """The state of memory when a rank had just failed in a way that memory may explain."""

    pids: tuple[int, ...]
    """The processes whose end is to be explained: the rank, or the workers of its DataLoader."""
    shortage: oom.Shortage | None
    shared_memory: events.SharedMemory | None


class MemoryWatchdog:
    """The memory of the ranks of one attempt."""

    def __init__(self, counters: oom.Counters) -> None:
        self._counters = counters
        self._looks = deque([counters.look()], _REMEMBERED)
        self._shared = deque[events.SharedMemory](maxlen=_REMEMBERED)
        self._memory: dict[int, int] = {}
        """The most memory that was seen of each pid."""
        self._snapshots: dict[int, _FailureSnapshot] = {}
        self._ended: set[int] = set()
        self._next_look = 0.0

    def turn(self, ranks: Collection[WatchedRank], now: float) -> None:
        """Looks at ranks that have failed, and once a second at all. To be called in every turn of the agent's loop."""
        for rank in ranks:
            if rank.rank not in self._ended:
                self._check(rank)
        if now >= self._next_look:
            self._next_look = now + _EVERY
            self._look(ranks)

    def explain(self, endings: Sequence[events.Ending]) -> list[events.Ending]:
        """Adds what is known of memory to the ends of ranks."""
        suspects = {
            pid: snapshot.shortage
            for snapshot in self._snapshots.values()
            if snapshot.shortage
            for pid in snapshot.pids
        }
        chosen = oom.killed_by_log(suspects) if suspects else {}
        if suspects and not chosen:
            # Only the number of kills is known; the kernel kills the largest processes.
            kills = max(shortage.kills for shortage in suspects.values())
            by_size = sorted(suspects, key=lambda pid: self._memory.get(pid, 0), reverse=True)
            chosen = dict.fromkeys(by_size[:kills], 0)
        return [self._explained(ending, chosen) for ending in endings]

    def last_words(self, ranks: Mapping[int, int]) -> list[str]:
        """When the ranks' own ends cannot be known any more. ``ranks``: pid to rank, of those that were alive."""
        shortage = oom.shortage(self._looks[0], self._counters.look())
        if shortage is None:
            return []
        from phalanx.failure.signal_meaning import memory_ran_out  # not needed while all goes well

        used = {ranks[pid]: memory for pid, memory in oom.killed_by_log(ranks).items()}
        return memory_ran_out(shortage.kills, shortage.limit, shortage.group, used)

    def _explained(self, ending: events.Ending, chosen: dict[int, int]) -> events.Ending:
        ending = messages.replace(ending, memory=self._memory.get(ending.pid))
        snapshot = self._snapshots.get(ending.rank)
        if snapshot is None:
            return ending
        killed = next((pid for pid in snapshot.pids if pid in chosen), None)
        if killed is None or snapshot.shortage is None:
            return messages.replace(ending, shared_memory=snapshot.shared_memory)
        used = max(chosen[killed], self._memory.get(killed, 0)) or None
        return messages.replace(
            ending, out_of_memory=events.OutOfMemory(killed, used, snapshot.shortage.limit, snapshot.shortage.group)
        )

    # ---- while they live

    def _look(self, ranks: Collection[WatchedRank]) -> None:
        self._looks.append(self._counters.look())
        shared = _shared_memory()
        if shared is not None:
            self._shared.append(shared)
        for rank in ranks:
            if rank.pid is not None and not rank.exited:
                for pid in (rank.pid, *procfs.children(rank.pid)):
                    self._remember(pid, procfs.resident(pid))

    def _remember(self, pid: int, memory: int | None) -> None:
        if memory:
            self._memory[pid] = max(memory, self._memory.get(pid, 0))

    # ---- when one has failed

    def _check(self, rank: WatchedRank) -> None:
        if rank.error is not None and rank.rank not in self._snapshots:
            self._read_message(rank.rank, rank.error.message)
        if rank.exited is None:
            return
        self._ended.add(rank.rank)
        self._remember(rank.exited.pid, rank.exited.memory)
        if rank.exited.signal == signal.SIGKILL and rank.asked_with != signal.SIGKILL:
            self._take_snapshot(rank.rank, [rank.exited.pid])
        elif rank.exited.signal == signal.SIGBUS:
            self._take_snapshot(rank.rank, [], with_shared_memory=True)

    def _read_message(self, rank: int, message: str) -> None:
        """Looks for the end of another process, or a full /dev/shm, in a rank's exception."""
        loader = _LOADER.search(message)
        if loader is not None:
            is_bus_error = loader[2].endswith("Bus error")
            pids = [] if is_bus_error else [int(pid) for pid in loader[1].split(",")]
            self._take_snapshot(rank, pids, with_shared_memory=is_bus_error)
        elif "No space left on device" in message and ("shm" in message or "/torch_" in message):
            self._take_snapshot(rank, [], with_shared_memory=True)

    def _take_snapshot(self, rank: int, pids: Sequence[int], *, with_shared_memory: bool = False) -> None:
        shortage = oom.shortage(self._looks[0], self._counters.look())
        shared = [*self._shared, _shared_memory()] if with_shared_memory else []
        fullest = max((each for each in shared if each is not None), key=lambda each: each.used, default=None)
        self._snapshots[rank] = _FailureSnapshot(tuple(pids), shortage, fullest)


def _shared_memory() -> events.SharedMemory | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    total = found.f_blocks * found.f_frsize
    return events.SharedMemory(total, total - found.f_bavail * found.f_frsize)
