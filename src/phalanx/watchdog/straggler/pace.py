"""The agent's eye on the pace of its ranks: a rank that holds up the others is named, and it is said when that is over.

With several nodes one of them compares the ranks of all; the others send it what it needs, every few seconds.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.status import layout
from phalanx.status.watched_rank import WatchedRank
from phalanx.status.windows import Window, read_windows
from phalanx.watchdog.straggler import conditions, straggler_text
from phalanx.watchdog.straggler.across_nodes import PaceExchange, PaceReport, StragglerRecord, StragglerVerdict
from phalanx.watchdog.straggler.conditions import Conditions, Look
from phalanx.watchdog.straggler.straggler_detector import Judge, Straggler

_EVERY = 1.0
_SEND_EVERY = 3.0
_SAID_AT_MOST = 2
"""Times in a run that the same rank is named on the console; the event file has them all."""
_LONG_ENOUGH = 0.9
"""Seconds over which the conditions of a rank are looked at."""


class PaceMonitor:
    """Of a run on this node."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._host = socket.gethostname()
        self._said: Counter[int] = Counter()

    def begin(self, exchange: PaceExchange) -> None:
        """A new attempt: the ranks count their steps from the start again."""
        self._exchange = exchange
        self._judge = Judge()
        self._due = self._sent_at = 0.0
        self._looks: dict[int, Look] = {}
        """Of ranks that may be slow, when that was first seen; of all ranks, if another node judges."""
        self._found: dict[int, Straggler] = {}
        """Those whose conditions have not been looked at for long enough."""
        self._unsent: dict[int, dict[int, Window]] = {}
        """By rank and step."""

    def look(self, members: Mapping[int, WatchedRank]) -> None:
        """To be called all the time."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _EVERY
        living = {rank: member.pid for rank, member in members.items() if member.pid and not member.exited}
        windows = {rank: read_windows(layout.status_path(self._directory, rank)) for rank in living}
        if self._exchange.is_judge:
            self._compare(windows, living)
        else:
            self._send(windows, living, now)

    # ---- this node judges

    def _compare(self, windows: Mapping[int, Sequence[Window]], living: Mapping[int, int]) -> None:
        others = self._exchange.others()
        if others is None:
            return  # without the others an own rank would be compared with the wrong ones
        elsewhere = {rank: found for one in others for rank, found in one.windows.items()}
        for found in self._judge.add({**elsewhere, **windows}):
            if found.rank in elsewhere:
                one = next(one for one in others if found.rank in one.windows)
                self._tell(found, one.host, one.conditions.get(found.rank))
            elif not found.is_over:
                self._found[found.rank] = found
            elif self._found.pop(found.rank, None) is None:
                self._tell(found, self._host, None)
        self._look_at_suspects(living)

    def _look_at_suspects(self, living: Mapping[int, int]) -> None:
        suspects = self._judge.suspects | self._found.keys()
        for rank in self._looks.keys() - suspects:
            del self._looks[rank]
        looks = conditions.looks([living[rank] for rank in suspects & living.keys()])
        for rank in suspects & living.keys():
            found = looks.get(living[rank])
            if found is None:
                continue
            first = self._looks.setdefault(rank, found)
            if rank in self._found and found.at - first.at >= _LONG_ENOUGH:
                self._tell(self._found.pop(rank), self._host, conditions.between(first, found))

    def _tell(self, found: Straggler, host: str, under: Conditions | None) -> None:
        line = straggler_text.one_line(found, host, under)
        record = StragglerRecord(
            said=line,
            rank=found.rank,
            host=host,
            is_over=found.is_over,
            slower=round(found.lag.slower, 3),
            own=round(found.lag.own, 6),
            usual=round(found.lag.usual, 6),
            steps=found.steps,
            at_step=found.lag.updates,
            phases=found.lag.phases,
            conditions=under,
        )
        self._said[found.rank] += 1
        is_said = self._said[found.rank] <= 2 * _SAID_AT_MOST  # its beginning and its end
        self._exchange.announce(StragglerVerdict((line,) if is_said else (), record))

    # ---- another one does

    def _send(self, windows: Mapping[int, Sequence[Window]], living: Mapping[int, int], now: float) -> None:
        for rank, found in windows.items():
            self._unsent.setdefault(rank, {}).update((window.updates, window) for window in found)
        if now < self._sent_at + _SEND_EVERY:
            return
        self._sent_at = now
        known = conditions.looks(living.values())
        looks = {rank: known[pid] for rank, pid in living.items() if pid in known}
        under = {
            rank: conditions.between(self._looks[rank], found) for rank, found in looks.items() if rank in self._looks
        }
        fresh = {rank: tuple(self._unsent[rank].values()) for rank in living}
        self._exchange.report(PaceReport(self._host, fresh, under))
        self._looks, self._unsent = looks, {}
