"""How the nodes of a run find out together that all ranks stand still, and why.

Each node whose ranks make no progress publishes one snapshot of them, and withdraws it when they do. Every node sees
those of all others, so each knows when to add the stacks of its own ranks; one node judges, and its verdict is
announced on all of them in the same words.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec.structs import replace

from phalanx import messages
from phalanx.messages import Message, Seconds, Text
from phalanx.status.rank_record import RankRecord
from phalanx.watchdog.stall.threshold import Sighting

_SOURCE = "what another node says of its ranks"


class StallSnapshot(Message, frozen=True):
    """The ranks of one node that make no progress."""

    quiet: Seconds
    """Since the last progress of any of them."""
    sightings: tuple[Sighting, ...]
    records: tuple[RankRecord, ...] | None = None
    """All that is known of them, with their stacks; None: that has not been looked at yet."""


class StallOver(Message, frozen=True):
    """The ranks of this node make progress again."""


class StallVerdict(Message, frozen=True):
    """What all nodes print, and do."""

    lines: tuple[Text, ...]
    verdict: Mapping[str, Any] | None = None
    """What is kept of it in the run's files; None: the stall is over."""
    kills: bool = False


class StallExchange:
    """The snapshots and verdicts of all nodes, in one attempt."""

    def __init__(
        self,
        own: int = 0,
        judge: int = 0,
        nodes: Collection[int] = (0,),
        lost: Collection[int] = (),
        publish: Callable[[bytes], None] = lambda body: None,
    ) -> None:
        """``lost``: nodes that are gone, as it grows; ``publish``: to all other nodes."""
        self.is_judge = own == judge
        self.announced: deque[StallVerdict] = deque()
        self._judge, self._others, self._lost, self._publish = judge, set(nodes) - {own}, lost, publish
        self._published: StallSnapshot | None = None
        self._snapshots: dict[int, tuple[StallSnapshot, float]] = {}
        """Of the other nodes, with the time when they came."""

    def publish(self, own: StallSnapshot | None) -> None:
        """Only when something has changed: that time passes everybody knows. None: the ranks make progress."""
        before, self._published = self._published, own
        if own is None:
            if before is not None:
                self._publish(messages.encode(StallOver()))
        elif before is None or (before.sightings, before.records) != (own.sightings, own.records):
            self._publish(messages.encode(own))

    def others(self) -> list[StallSnapshot] | None:
        """What the other nodes say, as of now; None: the ranks of one of them make progress."""
        expected = self._others - set(self._lost)
        if not expected <= self._snapshots.keys():
            return None
        now = time.monotonic()
        found = [self._snapshots[node] for node in sorted(expected)]
        return [_aged(snapshot, now - came) for snapshot, came in found]

    def announce(self, verdict: StallVerdict) -> None:
        """On all nodes."""
        self.announced.append(verdict)
        self._publish(messages.encode(verdict))

    def receive(self, node: int, body: bytes) -> None:
        """What another node has published."""
        match messages.decode(body, StallSnapshot | StallOver | StallVerdict, _SOURCE):
            case StallSnapshot() as snapshot:
                self._snapshots[node] = snapshot, time.monotonic()
            case StallOver():
                self._snapshots.pop(node, None)
            case StallVerdict() as verdict if node == self._judge:
                self.announced.append(verdict)
            case _:
                pass  # only one node judges


def _aged(snapshot: StallSnapshot, seconds: float) -> StallSnapshot:
    return replace(snapshot, quiet=snapshot.quiet + seconds, records=aged_records(snapshot.records, seconds))


def aged_records(records: tuple[RankRecord, ...] | None, seconds: float) -> tuple[RankRecord, ...] | None:
    """The same, so much later."""
    if records is None:
        return None
    return tuple(dataclasses.replace(record, quiet=record.quiet + seconds) for record in records)
