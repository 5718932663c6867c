"""Watches the pace of the ranks: names a rank that slows down the others, and reports when it keeps up again.

With several nodes one of them compares the ranks of all; the others send it their windows every few seconds.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.status import layout
from phalanx.status.rank_record import WatchedRank
from phalanx.status.windows import Window, read_windows
from phalanx.watchdog.straggler import conditions
from phalanx.watchdog.straggler.across_nodes import PaceExchange, PaceReport, StragglerRecord, StragglerVerdict
from phalanx.watchdog.straggler.conditions import Conditions, Look
from phalanx.watchdog.straggler.straggler_detector import Judge, Straggler, one_line

_EVERY = 1.0
_SEND_EVERY = 3.0
_PRINTED_AT_MOST = 2
"""The number of times that the same rank is named on the console in a run; the event file has all."""
_LONG_ENOUGH = 0.9
"""Seconds over which the conditions of a rank are sampled."""


class PaceMonitor:
    """Watches the pace of the ranks of this node in a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._host = socket.gethostname()
        self._printed: Counter[int] = Counter()

    def begin(self, exchange: PaceExchange) -> None:
        """Begins an attempt, in which the ranks count their steps from the start again."""
        self._exchange = exchange
        self._judge = Judge()
        self._due = self._sent_at = 0.0
        self._looks: dict[int, Look] = {}
        """The first sample of each rank that may be slow; of every rank, if another node judges."""
        self._found: dict[int, Straggler] = {}
        """Stragglers whose conditions have not been sampled for long enough."""
        self._unsent: dict[int, dict[int, Window]] = {}
        """By rank and step."""

    def look(self, ranks: Mapping[int, WatchedRank]) -> None:
        """Compares the ranks once a second. To be called in every turn of the agent's loop."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _EVERY
        living = {number: rank.pid for number, rank in ranks.items() if rank.pid and not rank.exited}
        windows = {rank: read_windows(layout.status_path(self._directory, rank)) for rank in living}
        if self._exchange.is_judge:
            self._compare(windows, living)
        else:
            self._send(windows, living, now)

    # ---- this node judges

    def _compare(self, windows: Mapping[int, Sequence[Window]], living: Mapping[int, int]) -> None:
        others = self._exchange.others()
        if others is None:
            return  # all ranks are needed for the median
        elsewhere = {rank: found for one in others for rank, found in one.windows.items()}
        for found in self._judge.add({**elsewhere, **windows}):
            if found.rank in elsewhere:
                one = next(one for one in others if found.rank in one.windows)
                self._announce(found, one.host, one.conditions.get(found.rank))
            elif not found.is_over:
                self._found[found.rank] = found
            elif self._found.pop(found.rank, None) is None:
                self._announce(found, self._host, None)
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
                self._announce(self._found.pop(rank), self._host, conditions.between(first, found))

    def _announce(self, found: Straggler, host: str, under: Conditions | None) -> None:
        line = one_line(found, host, under)
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
        self._printed[found.rank] += 1
        is_printed = self._printed[found.rank] <= 2 * _PRINTED_AT_MOST  # its beginning and its end
        self._exchange.announce(StragglerVerdict((line,) if is_printed else (), record))

    # ---- another node judges

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
