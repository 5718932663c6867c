"""Watches the ranks of this node about once a second: when each last made progress, and what it does since.

As long as they make progress, a look reads three kilobytes for each rank.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from phalanx import messages
from phalanx.devices import gpu_state
from phalanx.status import layout, reading
from phalanx.status.rank_record import Child, RankRecord, WatchedRank
from phalanx.system import procfs
from phalanx.watchdog.stall.proc_sampler import ProcSampler

_SLEPT = 5.0
"""Seconds without a look: this process was stopped, or the machine was asleep."""


class ProgressMonitor:
    """The progress of the ranks of this node in one attempt."""

    def __init__(self, directory: Path, stall_after: float) -> None:
        self._directory, self._stall_after = directory, stall_after
        self._every = min(1.0, stall_after / 5)
        self._sampler = ProcSampler(stall_after)
        self._pulses: dict[int, tuple[int, ...] | None] = {}
        self._moved_at: dict[int, float] = {}
        self._just_moved: set[int] = set()
        """Ranks that have made progress since the look before; the exact time is not known yet."""
        self._looked_at = 0.0
        self._host = socket.gethostname()
        self._has_driver = True

    def is_due(self, now: float) -> bool:
        return now >= self._looked_at + self._every

    def look(self, ranks: Mapping[int, WatchedRank], now: float) -> bool:
        """Returns True if any rank has made progress since the last look."""
        started = time.monotonic()
        if self._looked_at and now - self._looked_at > _SLEPT:
            self._pulses.clear()
        has_moved = self._look(ranks, now)
        self._looked_at = now + time.monotonic() - started  # a look at thousands of processes takes its time
        return has_moved

    def _look(self, ranks: Mapping[int, WatchedRank], now: float) -> bool:
        moved = [rank for rank, watched in ranks.items() if self._has_moved(rank, watched)]
        for rank in self._just_moved.difference(moved):
            self._moved_at[rank] = self._when_moved(rank, now)
        self._just_moved = set(moved)
        for rank in moved:
            self._moved_at[rank] = now
        if moved:
            self._sampler.clear()
        elif self.quiet(now) >= self._stall_after / 2:
            self._sampler.look([pid for rank in ranks.values() if (pid := _living(rank)) is not None], now)
            for path in (layout.status_path(self._directory, rank) for rank in ranks):
                if (page := reading.read(path)) is not None and page.device:
                    reading.ask(path, 0.0)  # what its device does is read at the next look
        return bool(moved)

    def _has_moved(self, rank: int, watched: WatchedRank) -> bool:
        pulse = reading.pulse(layout.status_path(self._directory, rank)) or ()
        pulse = (*pulse, watched.pid or 0, watched.exited is not None)
        before = self._pulses.get(rank)
        self._pulses[rank] = pulse
        return pulse != before

    def _when_moved(self, rank: int, now: float) -> float:
        """Returns when a rank last made progress: by its page, if that time is plausible."""
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
        """True if the processes have been sampled for long enough to know which of them work."""
        return self._sampler.span >= self._stall_after / 4

    def records(self, ranks: Mapping[int, WatchedRank], now: float) -> list[RankRecord]:
        """Returns what is known of each rank without waiting for an answer."""
        records = [self._record(number, rank, now) for number, rank in sorted(ranks.items())]
        if not self._has_driver or not any(record.device for record in records):
            return records
        gpus = gpu_state.by_process()
        self._has_driver = bool(gpus)  # one that has not answered may hang
        return [messages.replace(one, gpu=gpus.get(one.vitals.pid if one.vitals else -1)) for one in records]

    def _record(self, number: int, rank: WatchedRank, now: float) -> RankRecord:
        pid, exited, page = _living(rank), rank.exited, reading.read(layout.status_path(self._directory, number))
        below = [self._sampler.vitals(child) for child in self._sampler.families.get(pid or 0, ())]
        return RankRecord(
            number,
            self._host,
            status=page,
            quiet=now - self._moved_at.get(number, now),
            vitals=None if pid is None else self._sampler.vitals(pid, is_on_gpu=page is not None and page.device != ""),
            children=tuple(Child(one, procfs.command(one.pid)) for one in below if one is not None),
            exit_code=None if exited is None else exited.exit_code or -(exited.signal or 0),
            thread_death=rank.thread_death,
        )


def _living(rank: WatchedRank) -> int | None:
    return rank.pid if rank.exited is None else None
