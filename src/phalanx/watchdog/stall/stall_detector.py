"""The watch over ranks that make no progress: when they stand still it finds out why, says it, and perhaps ends them.

It is called from the agent's loop. What takes time (asking ranks for their stacks) happens on another thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx import run_files
from phalanx.launch.hearing import Announcement, Hearing, Report
from phalanx.status.rank_record import RankRecord
from phalanx.status.watched_rank import WatchedRank
from phalanx.watchdog.stall.classify import Hang, find_hang
from phalanx.watchdog.stall.dump_file import dossier
from phalanx.watchdog.stall.progress import Vigil
from phalanx.watchdog.stall.snapshot import Inquiry, Subject
from phalanx.watchdog.stall.stall_text import go_on, headline, verdict_lines
from phalanx.watchdog.stall.threshold import Sighting, patience, sighting_of

_AGAIN = 10
"""A verdict that has not changed is said again after ten times as long."""
_LOOK_AGAIN = 2
"""Whether it has changed is looked at after twice as long, or when the pages say so."""
_TESTIMONY = 10.0
"""Seconds that the other nodes have to tell what they know."""


@dataclass(frozen=True)
class Terms:
    """What the user has asked for."""

    stall_after: float
    """Seconds; 0: nothing is watched."""
    kills: bool


@dataclass(frozen=True)
class Told:
    """The verdict that stands."""

    picture: tuple[object, ...]
    sightings: tuple[object, ...]
    said: float
    """Seconds without progress when it was said."""
    looked: float
    """And when it was last confirmed."""


@dataclass
class _Case:
    """An inquiry that is under way."""

    number: int
    inquiry: Inquiry
    opened: float
    until: float


class StallWatch:
    """Of one attempt on this node."""

    def __init__(self, terms: Terms, directory: Path, place: str, hearing: Hearing, wake: Callable[[], None]) -> None:
        """``place``: the run directory, as it is told; ``wake``: makes the agent's loop turn."""
        self._terms, self._directory, self._place = terms, directory, place
        self._hearing, self._wake = hearing, wake
        self._vigil = Vigil(directory, terms.stall_after)
        self._case: _Case | None = None
        self._inquiry: Inquiry | None = None
        self._count = 0
        self._not_before = 0.0
        self._told: Told | None = None
        self._trouble: str | None = None
        """Why not everything could be found out."""
        self._quiet = 0.0
        """The longest that has been seen, of all nodes."""

    def look(self, members: Mapping[int, WatchedRank]) -> None:
        """Cheap, and most of the time nothing at all."""
        now = time.monotonic()
        if self._terms.stall_after and self._vigil.is_due(now):
            self._look(members, now)

    def announced(self) -> Iterator[Announcement]:
        """What is to be said now, on all nodes."""
        while self._hearing.announced:
            yield self._hearing.announced.popleft()

    def close(self) -> None:
        if self._inquiry is not None:
            self._inquiry.join()

    def _look(self, members: Mapping[int, WatchedRank], now: float) -> None:
        if self._vigil.look(members, now):
            self._case = None  # what it finds is of no interest any more
        quiet = self._vigil.quiet(now)
        if quiet < self._terms.stall_after:
            self._hearing.report(None)
            self._end_stall()
            return
        if not self._vigil.is_informed:
            return
        subjects = self._vigil.subjects(members, now)
        report = Report(quiet, tuple(sighting_of(subject.record) for subject in subjects))
        self._hearing.report(report)
        if self._case is not None:
            self._go_on_with(self._case, now)
        elif self._hearing.is_judge:
            self._judge(report, subjects, now)
        elif self._hearing.called > self._count:
            self._open_case(self._hearing.called, subjects, now)

    # ---- is it one?

    def _judge(self, own: Report, subjects: Sequence[Subject], now: float) -> None:
        others = self._hearing.others()
        if others is None:
            self._end_stall()
            return
        quiet = min(one.quiet for one in (own, *others))
        sightings = [sighting for one in (own, *others) for sighting in one.sightings]
        self._quiet = max(self._quiet, quiet)
        limit = patience(sightings, self._terms.stall_after)
        if limit is not None and quiet >= limit and now >= self._not_before and self._is_news(sightings, quiet):
            self._hearing.call(self._count + 1)
            self._open_case(self._count + 1, subjects, now)

    def _is_news(self, sightings: Sequence[Sighting], quiet: float) -> bool:
        told = self._told
        return told is None or told.sightings != _essence(sightings) or quiet >= _LOOK_AGAIN * told.looked

    def _end_stall(self) -> None:
        """Somebody has got on."""
        if self._hearing.is_judge and self._told is not None:
            self._hearing.announce(Announcement((go_on(self._quiet),)))
        self._told, self._quiet = None, 0.0

    # ---- why?

    def _open_case(self, number: int, subjects: Sequence[Subject], now: float) -> None:
        self._count = number
        self._inquiry = Inquiry(subjects, self._directory, self._wake)
        self._case = _Case(number, self._inquiry, now, now + _TESTIMONY)

    def _go_on_with(self, case: _Case, now: float) -> None:
        if not case.inquiry.is_over:
            return
        records = case.inquiry.records or ()
        if not self._hearing.is_judge:
            self._case = None
            self._hearing.testify(case.number, records)
            return
        others = self._hearing.testimonies(case.number)
        gets_on = self._hearing.others() is None  # who gets on does not testify
        if others is None and now < case.until and not gets_on:
            return
        self._case = None
        self._trouble = case.inquiry.trouble
        # Whatever comes of it: ranks that are looked at all the time would never be left in peace.
        self._not_before = now + max(1.0, self._terms.stall_after / 2)
        if others is not None and not gets_on:
            asked_for = now - case.opened
            found = [replace(record, quiet=record.quiet + asked_for) for record in (*records, *others)]
            self._conclude(sorted(found, key=lambda record: record.rank))

    def _conclude(self, records: list[RankRecord]) -> None:
        """They have been asked since it was decided to: it may look different now."""
        hang = find_hang(records)
        sightings = [sighting_of(record) for record in records]
        limit = patience(sightings, self._terms.stall_after)
        if limit is None or hang.quiet < limit:
            return
        told = self._told
        is_new = told is None or told.picture != hang.picture or hang.quiet >= _AGAIN * told.said
        said = hang.quiet if is_new or told is None else told.said
        self._told = Told(hang.picture, _essence(sightings), said, hang.quiet)
        if is_new:
            self._hearing.announce(self._verdict(hang, records))

    # ---- the words

    def _verdict(self, hang: Hang, records: list[RankRecord]) -> Announcement:
        lines = verdict_lines(hang)
        where = self._keep(records, lines)
        what = "ending the run (--on-stall kill)" if self._terms.kills else "waiting on (--on-stall kill ends the run)"
        lines.append(f"  {where}; {what}")
        kept = {"kind": hang.kind, "headline": headline(hang), "ranks": hang.culprits, "lines": lines}
        return Announcement(tuple(lines), kept, self._terms.kills)

    def _keep(self, records: list[RankRecord], lines: Sequence[str]) -> str:
        taken = len(list(self._directory.glob("stall-*.txt")))  # by attempts before this one, too
        name = f"stall-{taken + 1}.txt"
        try:
            fd = run_files.open_file(self._directory / name, os.O_WRONLY | os.O_CREAT)
            with os.fdopen(fd, "w", errors="replace") as file:
                file.write(dossier(records, lines))
        except OSError as error:
            return f"the stacks could not be written ({error.strerror})"
        what = f"what could be found out ({self._trouble})" if self._trouble else "all stacks"
        return f"{what}: {self._place}/{name}"


def _essence(sightings: Sequence[Sighting]) -> tuple[object, ...]:
    """What can change without any progress, and matters: not whether a rank computes at this moment."""
    return tuple(replace(one, works=False, moves=False) for one in sightings)
