"""Detects ranks that make no progress, finds out why, announces it, and asks for their end if the user wants that.

The agent's loop calls it. What takes time (asking ranks for their stacks) happens on another thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path

from phalanx import run_files
from phalanx.events import HangRecord
from phalanx.messages import replace
from phalanx.status.layout import those
from phalanx.status.rank_record import RankRecord, WatchedRank
from phalanx.watchdog.stall.across_nodes import StallExchange, StallSnapshot, StallVerdict, aged_records
from phalanx.watchdog.stall.classify import Hang, find_hang
from phalanx.watchdog.stall.dump_file import dump_lines
from phalanx.watchdog.stall.progress import ProgressMonitor
from phalanx.watchdog.stall.snapshot import SnapshotCollector
from phalanx.watchdog.stall.stall_text import go_on, headline, verdict_lines
from phalanx.watchdog.stall.threshold import Observation, observation_of, stall_threshold

_AGAIN = 10
"""A verdict that has not changed is announced again after ten times as long."""
_LOOK_AGAIN = 2
"""The ranks are asked again after twice as long, or when their pages have changed."""


@dataclass(frozen=True)
class Terms:
    """The user's flags."""

    stall_after: float
    """Seconds; 0 turns the detector off."""
    kills: bool


@dataclass(frozen=True)
class Announced:
    """The last verdict."""

    picture: tuple[object, ...]
    quiet: float
    """Seconds without progress when it was announced."""


@dataclass(frozen=True)
class _Collected:
    """All that is known of the ranks of this node."""

    records: tuple[RankRecord, ...]
    at: float
    quiet: float
    """Seconds without progress when they were asked."""


class StallDetector:
    """Watches the ranks of this node in one attempt."""

    def __init__(
        self, terms: Terms, directory: Path, place: str, exchange: StallExchange, wake: Callable[[], None]
    ) -> None:
        """``place``: the run directory, as it is printed; ``exchange``: with the other nodes; ``wake``: wakes the
        agent's loop."""
        self._terms, self._directory, self._place = terms, directory, place
        self._exchange, self._wake = exchange, wake
        self._progress = ProgressMonitor(directory, terms.stall_after)
        self._collector: SnapshotCollector | None = None
        self._is_collecting = False
        self._begun = _Collected((), 0.0, 0.0)
        """When the collector was started."""
        self._collected: _Collected | None = None
        self._judged: tuple[object, ...] = ()
        self._not_before = 0.0
        self._announced: Announced | None = None
        self._trouble: str | None = None
        """The reason why the last snapshot is not complete."""
        self._quiet = 0.0
        """The longest time without progress on all nodes."""

    def look(self, ranks: Mapping[int, WatchedRank]) -> None:
        """Looks at the ranks if that is due. To be called in every turn of the agent's loop."""
        now = time.monotonic()
        if self._terms.stall_after and self._progress.is_due(now):
            self._look(ranks, now)

    def announced(self) -> Iterator[StallVerdict]:
        """Yields the new verdicts, for this node to print."""
        while self._exchange.announced:
            yield self._exchange.announced.popleft()

    def close(self) -> None:
        if self._collector is not None:
            self._collector.join()

    def _look(self, ranks: Mapping[int, WatchedRank], now: float) -> None:
        if self._progress.look(ranks, now):
            self._is_collecting, self._collected = False, None  # a snapshot of before is useless
        quiet = self._progress.quiet(now)
        if quiet < self._terms.stall_after:
            self._exchange.publish(None)
            self._end_stall()
            return
        if not self._progress.is_informed:
            return
        records = self._progress.records(ranks, now)
        sightings = tuple(map(observation_of, records))
        self._update_records(sightings, quiet, now)
        known = self._collected
        own = StallSnapshot(quiet, sightings, known.records if known is not None else None)
        self._exchange.publish(own)
        others = self._exchange.others()
        if others is None:
            self._end_stall()
            return
        if known is not None:
            own = replace(own, records=aged_records(known.records, now - known.at))
        if self._is_due(own, others):
            self._collect(records, own, now)
            self._judge((own, *others))
        else:
            self._tell_who_compiles([sighting for one in (own, *others) for sighting in one.sightings], quiet)

    # ---- is it one?

    def _is_due(self, own: StallSnapshot, others: Sequence[StallSnapshot]) -> bool:
        """True if this is a stall. Every node sees the same, so each knows when the stacks of its ranks are wanted."""
        quiet = min(one.quiet for one in (own, *others))
        self._quiet = max(self._quiet, quiet)
        limit = stall_threshold(
            [sighting for one in (own, *others) for sighting in one.sightings], self._terms.stall_after
        )
        return limit is not None and quiet >= limit

    def _tell_who_compiles(self, sightings: Sequence[Observation], quiet: float) -> None:
        """Announces once that others wait for ranks that compile: that is no stall."""
        ranks = [one.rank for one in sightings if one.phase == "compile" and not one.waits_in]
        if ranks and any(one.waits_in for one in sightings) and self._exchange.is_judge and self._announced is None:
            self._announced = Announced(tuple(ranks), quiet)
            line = f"{those(ranks)} compile{'s' * (len(ranks) == 1)} ({quiet:.0f} s); the others have their cache"
            self._exchange.announce(StallVerdict((line,)))

    def _end_stall(self) -> None:
        """Announces the end of a stall, if there was one: a rank makes progress."""
        if self._exchange.is_judge and self._announced is not None:
            self._exchange.announce(StallVerdict((go_on(self._quiet),)))
        self._announced, self._quiet = None, 0.0

    # ---- why?

    def _collect(self, records: Sequence[RankRecord], own: StallSnapshot, now: float) -> None:
        """Starts a collector, unless one runs or was done a moment ago: asking disturbs the ranks."""
        if self._collected is None and not self._is_collecting and now >= self._not_before:
            self._is_collecting = True
            self._begun = _Collected((), now, own.quiet)
            self._collector = SnapshotCollector(records, self._directory, self._wake)

    def _update_records(self, sightings: Sequence[Observation], quiet: float, now: float) -> None:
        """Takes what was collected, and drops it when the pages have changed since, or after twice as long."""
        collector = self._collector
        if self._is_collecting and collector is not None and collector.is_over:
            self._is_collecting = False
            self._trouble = collector.trouble
            self._not_before = now + max(1.0, self._terms.stall_after / 2)
            records = aged_records(tuple(collector.records), now - self._begun.at)
            self._collected = replace_fields(self._begun, records=records, at=now)
        known = self._collected
        if known is not None:
            has_changed = _essence(map(observation_of, known.records)) != _essence(sightings)
            if has_changed or quiet >= _LOOK_AGAIN * known.quiet:
                self._collected = None

    def _judge(self, snapshots: Sequence[StallSnapshot]) -> None:
        """Announces a verdict, if the records of all ranks are there and it is new."""
        if not self._exchange.is_judge or any(one.records is None for one in snapshots):
            return
        records = sorted((record for one in snapshots for record in one.records or ()), key=lambda found: found.rank)
        seen = tuple(replace(record, quiet=0.0) for record in records)
        last = self._announced
        if last is not None and seen == self._judged and min(one.quiet for one in snapshots) < _AGAIN * last.quiet:
            return
        hang = find_hang(records)
        limit = stall_threshold([observation_of(record) for record in records], self._terms.stall_after)
        if limit is None or hang.quiet < limit:
            self._collected = None  # it was no stall when the ranks were asked
            return
        self._judged = seen
        if last is None or last.picture != hang.picture or hang.quiet >= _AGAIN * last.quiet:
            self._announced = Announced(hang.picture, hang.quiet)
            self._exchange.announce(self._verdict(hang, records))

    # ---- the verdict

    def _verdict(self, hang: Hang, records: list[RankRecord]) -> StallVerdict:
        lines = verdict_lines(hang)
        where = self._keep(records, lines)
        what = (
            "ending the run (--on-stall kill)" if self._terms.kills else "still waiting (--on-stall kill ends the run)"
        )
        lines.append(f"  {where}; {what}")
        kept = HangRecord(headline(hang), hang.kind, tuple(hang.culprits), tuple(lines))
        return StallVerdict(tuple(lines), kept, self._terms.kills)

    def _keep(self, records: list[RankRecord], lines: Sequence[str]) -> str:
        taken = len(list(self._directory.glob("stall-*.txt")))  # by attempts before this one, too
        name = f"stall-{taken + 1}.txt"
        try:
            fd = run_files.open_file(self._directory / name, os.O_WRONLY | os.O_CREAT)
            with os.fdopen(fd, "w", errors="replace") as file:
                file.write(dump_lines(records, lines))
        except OSError as error:
            return f"the stacks could not be written ({error.strerror})"
        what = f"what could be found out ({self._trouble})" if self._trouble else "all stacks"
        return f"{what}: {self._place}/{name}"


def _essence(sightings: Iterable[Observation]) -> tuple[object, ...]:
    """Returns what matters of observations: not if a rank computes at this moment."""
    return tuple(replace(one, works=False, moves=False) for one in sightings)
