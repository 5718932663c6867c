"""What the agent sees of its ranks' memory: once a second while they live, and in the moment when one has failed.

Afterwards it is too late: what a process had in memory is gone with it, and /dev/shm has room again.
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
    from phalanx.status.watched_rank import WatchedRank

_EVERY = 1.0
_REMEMBERED = 10
"""Looks. A process with much memory may take seconds to end after the kernel has killed it."""
_LOADER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: (?:Killed|Bus error)|exited)"
)


@dataclass(frozen=True)
class _FailureSnapshot:
    """What was there when a rank had just failed in a way that may be memory's fault."""

    pids: tuple[int, ...]
    """Whose end is to be explained: the rank's own, or the workers' of its loader."""
    shortage: oom.Shortage | None
    shared_memory: events.SharedMemory | None


class MemoryWatchdog:
    """Of the ranks of one attempt."""

    def __init__(self, counters: oom.Counters) -> None:
        self._counters = counters
        self._looks = deque([counters.look()], _REMEMBERED)
        self._shared = deque[events.SharedMemory](maxlen=_REMEMBERED)
        self._memory: dict[int, int] = {}
        """pid to the most that was seen of its memory."""
        self._scenes: dict[int, _FailureSnapshot] = {}
        self._ended: set[int] = set()
        self._next_look = 0.0

    def turn(self, members: Collection[WatchedRank], now: float) -> None:
        """To be called in every turn of the loop."""
        for member in members:
            if member.rank not in self._ended:
                self._notice(member)
        if now >= self._next_look:
            self._next_look = now + _EVERY
            self._look(members)

    def explain(self, endings: Sequence[events.Ending]) -> list[events.Ending]:
        """The same, with what is known of their memory."""
        suspects = {pid: scene.shortage for scene in self._scenes.values() if scene.shortage for pid in scene.pids}
        chosen = oom.killed_by_log(suspects) if suspects else {}
        if suspects and not chosen:
            # It is only known how many; the kernel chooses the largest.
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
        scene = self._scenes.get(ending.rank)
        if scene is None:
            return ending
        killed = next((pid for pid in scene.pids if pid in chosen), None)
        if killed is None or scene.shortage is None:
            return messages.replace(ending, shared_memory=scene.shared_memory)
        used = max(chosen[killed], self._memory.get(killed, 0)) or None
        return messages.replace(
            ending, out_of_memory=events.OutOfMemory(killed, used, scene.shortage.limit, scene.shortage.group)
        )

    # ---- while they live

    def _look(self, members: Collection[WatchedRank]) -> None:
        self._looks.append(self._counters.look())
        shared = _shared_memory()
        if shared is not None:
            self._shared.append(shared)
        for member in members:
            if member.pid is not None and not member.exited:
                for pid in (member.pid, *procfs.children(member.pid)):
                    self._remember(pid, procfs.resident(pid))

    def _remember(self, pid: int, memory: int | None) -> None:
        if memory:
            self._memory[pid] = max(memory, self._memory.get(pid, 0))

    # ---- when one has failed

    def _notice(self, member: WatchedRank) -> None:
        if member.error is not None and member.rank not in self._scenes:
            self._hear(member.rank, member.error.message)
        if member.exited is None:
            return
        self._ended.add(member.rank)
        self._remember(member.exited.pid, member.exited.memory)
        if member.exited.signal == signal.SIGKILL and member.asked_with != signal.SIGKILL:
            self._keep_scene(member.rank, [member.exited.pid])
        elif member.exited.signal == signal.SIGBUS:
            self._keep_scene(member.rank, [], with_shared_memory=True)

    def _hear(self, rank: int, message: str) -> None:
        """A rank's exception may be about the end of another process, or about /dev/shm."""
        loader = _LOADER.search(message)
        if loader is not None:
            is_bus_error = loader[2].endswith("Bus error")
            pids = [] if is_bus_error else [int(pid) for pid in loader[1].split(",")]
            self._keep_scene(rank, pids, with_shared_memory=is_bus_error)
        elif "No space left on device" in message and ("shm" in message or "/torch_" in message):
            self._keep_scene(rank, [], with_shared_memory=True)

    def _keep_scene(self, rank: int, pids: Sequence[int], *, with_shared_memory: bool = False) -> None:
        shortage = oom.shortage(self._looks[0], self._counters.look())
        shared = [*self._shared, _shared_memory()] if with_shared_memory else []
        fullest = max((each for each in shared if each is not None), key=lambda each: each.used, default=None)
        self._scenes[rank] = _FailureSnapshot(tuple(pids), shortage, fullest)


def _shared_memory() -> events.SharedMemory | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    total = found.f_blocks * found.f_frsize
    return events.SharedMemory(total, total - found.f_bavail * found.f_frsize)
