"""The agent's eye on the pace of its ranks: it names a rank that holds up the others, and says when that is over."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from phalanx import status
from phalanx.diagnose import conditions, straggler_words
from phalanx.diagnose.conditions import Conditions, Look
from phalanx.diagnose.straggler import Judge, Straggler
from phalanx.launch.member import Member
from phalanx.launch.record import Record

_EVERY = 1.0
_SAID_AT_MOST = 2
"""Times in a run that the same rank is named on the console; the event file has them all."""
_LONG_ENOUGH = 0.9
"""Seconds over which the conditions of a rank are looked at."""


class Pace:
    """Of a run on this node. ``say`` says a line on the console."""

    def __init__(self, directory: Path, record: Record, say: Callable[[str], None]) -> None:
        self._directory, self._record, self._say = directory, record, say
        self._said: Counter[int] = Counter()
        self.begin()

    def begin(self) -> None:
        """A new attempt: the ranks count their steps from the start again."""
        self._judge = Judge()
        self._due = 0.0
        self._looks: dict[int, Look] = {}
        """Of ranks that may be slow, when that was first seen."""
        self._found: dict[int, Straggler] = {}
        """Those whose conditions have not been looked at for long enough."""

    def look(self, members: Mapping[int, Member]) -> None:
        """To be called all the time."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _EVERY
        living = {rank: member.pid for rank, member in members.items() if member.pid and not member.exited}
        windows = {rank: status.windows(status.status_path(self._directory, rank)) for rank in living}
        for found in self._judge.add(windows):
            if not found.is_over:
                self._found[found.rank] = found
            elif self._found.pop(found.rank, None) is None:
                self._tell(found, None)
        self._look_at_suspects(living)

    def _look_at_suspects(self, living: Mapping[int, int]) -> None:
        suspects = self._judge.suspects | self._found.keys()
        for rank in self._looks.keys() - suspects:
            del self._looks[rank]
        for rank in suspects & living.keys():
            found = conditions.look(living[rank])
            if found is None:
                continue
            first = self._looks.setdefault(rank, found)
            if rank in self._found and found.at - first.at >= _LONG_ENOUGH:
                self._tell(self._found.pop(rank), conditions.between(first, found))

    def _tell(self, found: Straggler, under: Conditions | None) -> None:
        host = self._record.host
        line = straggler_words.one_line(found, host, under)
        fields = {
            "said": line,
            "rank": found.rank,
            "host": host,
            "is_over": found.is_over,
            "slower": round(found.lag.slower, 3),
            "own": round(found.lag.own, 6),
            "usual": round(found.lag.usual, 6),
            "steps": found.steps,
            "at_step": found.lag.updates,
            "phases": found.lag.phases,
            "conditions": dataclasses.asdict(under) if under is not None else None,
        }
        self._record.keep_straggler(fields)
        if self._said[found.rank] < 2 * _SAID_AT_MOST:  # its beginning and its end
            self._said[found.rank] += 1
            self._say(line)
