"""How the nodes of a run find out together that all stand still, and why: one of them judges, the others testify.

Each says when its ranks make no progress, and takes it back when they do. When all say so, the judge calls for all
that is known of every rank, and what it concludes is announced on all nodes in the same words.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx import plain
from phalanx.launch.tidings import Tidings
from phalanx.status import rank_record
from phalanx.status.rank_record import RankRecord
from phalanx.watchdog.stall.threshold import Sighting


@dataclass(frozen=True)
class Report:
    """What a node says of its ranks while they stand still."""

    quiet: float
    """Seconds without progress of any of them."""
    sightings: tuple[Sighting, ...]

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Report:
        """The opposite of dataclasses.asdict, from JSON."""
        return plain.fit(fields, Report, "what another node says of its ranks")


@dataclass(frozen=True)
class Announcement:
    """What all nodes say and do."""

    lines: tuple[str, ...]
    verdict: Mapping[str, Any] | None = None
    """What is kept of it in the run's files; None: it is over."""
    kills: bool = False
    straggler: Mapping[str, Any] | None = None
    """If it is not of ranks that stand still, but of one that holds up the others."""


class Hearing:
    """Of a run on one node: there is nobody else to be heard."""

    is_judge = True
    called = 0
    """The number of the inquiry that the judge has called for."""

    def __init__(self) -> None:
        self.announced: deque[Announcement] = deque()

    def report(self, own: Report | None) -> None:
        """What this node says now; None: its ranks get on."""

    def others(self) -> list[Report] | None:
        """What the other nodes say; None: the ranks of one of them get on."""
        return []

    def call(self, number: int) -> None:
        """The judge wants to know everything."""

    def testify(self, number: int, records: Sequence[RankRecord]) -> None:
        """To the judge."""

    def testimonies(self, number: int) -> list[RankRecord] | None:
        """Of the ranks of the other nodes; None: one has not answered yet."""
        return []

    def announce(self, announcement: Announcement) -> None:
        """On all nodes."""
        self.announced.append(announcement)

    def send(self, own: Tidings) -> None:
        """The pace of this node's ranks, to the judge."""

    def tidings(self) -> list[Tidings] | None:
        """Of the other nodes, the latest of each; None: there is one that has not sent any yet."""
        return []


class Court(Hearing):
    """Of one attempt on several nodes. What is said goes through the keepers and the store."""

    def __init__(
        self, own: int, judge: int, nodes: Collection[int], lost: Collection[int], write: Callable[..., None]
    ) -> None:
        """``lost``: nodes that are gone, as it grows; ``write``: an entry into the docket, with its arguments."""
        super().__init__()
        self.is_judge = own == judge
        self._own, self._others, self._lost, self._write = own, set(nodes) - {own}, lost, write
        self._reported: tuple[Sighting, ...] | None = None
        self._reports: dict[int, tuple[Report, float]] = {}
        """Of the other nodes, with the time when they came."""
        self._records: dict[tuple[int, int], list[RankRecord]] = {}
        """By inquiry and node."""
        self._tidings: dict[int, Tidings] = {}

    def report(self, own: Report | None) -> None:
        """Only when something has changed: that time passes everybody knows."""
        sightings = own.sightings if own is not None else None
        if sightings != self._reported:
            self._reported = sightings
            if not self.is_judge:
                self._write("report", self._own, None if own is None else dataclasses.asdict(own))

    def others(self) -> list[Report] | None:
        now = time.monotonic()
        expected = self._others - set(self._lost)
        if not expected <= self._reports.keys():
            return None
        found = [self._reports[node] for node in sorted(expected)]
        return [dataclasses.replace(report, quiet=report.quiet + now - came) for report, came in found]

    def call(self, number: int) -> None:
        self._records.clear()
        self._write("call", number)

    def testify(self, number: int, records: Sequence[RankRecord]) -> None:
        self._write("testify", number, self._own, [rank_record.to_fields(record) for record in records])

    def testimonies(self, number: int) -> list[RankRecord] | None:
        expected = self._others - set(self._lost)
        if not {(number, node) for node in expected} <= self._records.keys():
            return None
        return [record for node in sorted(expected) for record in self._records[number, node]]

    def announce(self, announcement: Announcement) -> None:
        super().announce(announcement)
        self._write("announce", dataclasses.asdict(announcement))

    def send(self, own: Tidings) -> None:
        self._write("send", self._own, own.to_fields())

    def tidings(self) -> list[Tidings] | None:
        expected = self._others - set(self._lost)
        return [self._tidings[node] for node in sorted(expected)] if expected <= self._tidings.keys() else None

    # ---- what the keeper hears

    def on_tidings(self, node: int, tidings: Mapping[str, Any]) -> None:
        self._tidings[node] = Tidings.from_fields(tidings)

    def on_reports(self, reports: Mapping[str, Any]) -> None:
        now = time.monotonic()
        found = {int(node): Report.from_fields(fields) for node, fields in reports.items() if fields is not None}
        # One that has not changed is as old as it was.
        known = {node: (report, came) for node, (report, came) in self._reports.items() if found.get(node) == report}
        self._reports = {node: (report, now) for node, report in found.items()} | known

    def on_called(self, number: int) -> None:
        self.called = number

    def on_testimony(self, number: int, node: int, records: Sequence[Mapping[str, Any]]) -> None:
        self._records[number, node] = [rank_record.from_fields(fields) for fields in records]

    def on_announced(self, announcement: Mapping[str, Any]) -> None:
        self.announced.append(plain.fit(announcement, Announcement, "what another node announces"))
