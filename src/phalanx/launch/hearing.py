"""How the nodes of a run find out together that all stand still, and why: one of them judges, the others testify.

Each says when its ranks make no progress, and takes it back when they do. When all say so, the judge calls for all
that is known of every rank, and what it concludes is announced on all nodes in the same words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.diagnose.patience import Sighting
from phalanx.diagnose.rank_record import RankRecord


@dataclass(frozen=True)
class Report:
    """What a node says of its ranks while they stand still."""

    quiet: float
    """Seconds without progress of any of them."""
    sightings: tuple[Sighting, ...]

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Report:
        """The opposite of dataclasses.asdict, from JSON."""
        sightings = (
            Sighting(**{**one, "waits_in": tuple(one["waits_in"]) if one["waits_in"] else None})
            for one in fields["sightings"]
        )
        return Report(fields["quiet"], tuple(sightings))


@dataclass(frozen=True)
class Announcement:
    """What all nodes say and do."""

    lines: tuple[str, ...]
    verdict: Mapping[str, Any] | None = None
    """What is kept of it in the run's files; None: it is over."""
    kills: bool = False


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
