"""The ranks of this node, seen about once a second: when they last got on, and what they do since.

As long as they get on, a look is a read of three kilobytes for each rank.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from phalanx.status import layout, reading
from phalanx.status.rank_record import Child, RankRecord
from phalanx.status.watched_rank import WatchedRank
from phalanx.system import procfs
from phalanx.watchdog.stall.proc_sampler import ProcSampler
from phalanx.watchdog.stall.snapshot import StalledRank

_SLEPT = 5.0
"""Seconds without a look: it was us who stood still, stopped or on a machine that was asleep."""


class ProgressMonitor:
    """Of one attempt."""

    def __init__(self, directory: Path, stall_after: float) -> None:
        self._directory, self._stall_after = directory, stall_after
        self._every = min(1.0, stall_after / 5)
        self._chart = ProcSampler(stall_after)
        self._pulses: dict[int, tuple[int, ...] | None] = {}
        self._moved_at: dict[int, float] = {}
        self._just_moved: set[int] = set()
        """Of these it is only known that it was since the look before."""
        self._looked_at = 0.0
        self._host = socket.gethostname()

    def is_due(self, now: float) -> bool:
        return now >= self._looked_at + self._every

    def look(self, members: Mapping[int, WatchedRank], now: float) -> bool:
        """Whether any rank has got on since the last look."""
        started = time.monotonic()
        if self._looked_at and now - self._looked_at > _SLEPT:
            self._pulses.clear()
        has_moved = self._look(members, now)
        self._looked_at = now + time.monotonic() - started  # a look at thousands of processes takes its time
        return has_moved

    def _look(self, members: Mapping[int, WatchedRank], now: float) -> bool:
        moved = [rank for rank, member in members.items() if self._has_moved(rank, member)]
        for rank in self._just_moved.difference(moved):
            self._moved_at[rank] = self._when_moved(rank, now)
        self._just_moved = set(moved)
        for rank in moved:
            self._moved_at[rank] = now
        if moved:
            self._chart.clear()
        elif self.quiet(now) >= self._stall_after / 2:
            self._chart.look([pid for member in members.values() if (pid := _living(member)) is not None], now)
        return bool(moved)

    def _has_moved(self, rank: int, member: WatchedRank) -> bool:
        pulse = reading.pulse(layout.status_path(self._directory, rank)) or ()
        pulse = (*pulse, member.pid or 0, member.exited is not None)
        before = self._pulses.get(rank)
        self._pulses[rank] = pulse
        return pulse != before

    def _when_moved(self, rank: int, now: float) -> float:
        """As its page says, if what it says fits."""
        noticed = self._moved_at[rank]
        page = reading.read(layout.status_path(self._directory, rank))
        if page is None:
            return noticed
        last = max([page.since, *(one.ended_at or 0.0 for one in page.collectives)])
        moved = now - (time.time() - last)
        return moved if noticed - 2 * self._every <= moved <= noticed else noticed

    def quiet(self, now: float) -> float:
        """Seconds since the last progress of any rank of this node."""
        return now - max(self._moved_at.values(), default=now)

    @property
    def is_informed(self) -> bool:
        """Whether it has watched them for long enough to say who works."""
        return self._chart.span >= self._stall_after / 4

    def subjects(self, members: Mapping[int, WatchedRank], now: float) -> list[StalledRank]:
        """What is known of each rank without asking it."""
        return [self._subject(rank, member, now) for rank, member in sorted(members.items())]

    def _subject(self, rank: int, member: WatchedRank, now: float) -> StalledRank:
        pid = _living(member)
        vitals = None if pid is None else self._chart.vitals(pid)
        below = [self._chart.vitals(child) for child in self._chart.families.get(pid or 0, ())]
        exited = member.exited
        record = RankRecord(
            rank,
            self._host,
            status=reading.read(layout.status_path(self._directory, rank)),
            quiet=now - self._moved_at.get(rank, now),
            vitals=vitals,
            children=tuple(Child(one, procfs.command(one.pid)) for one in below if one is not None),
            exit_code=None if exited is None else exited.exit_code or -(exited.signal or 0),
            thread_death=member.thread_death,
        )
        return StalledRank(record, pid)


def _living(member: WatchedRank) -> int | None:
    return member.pid if member.exited is None else None
