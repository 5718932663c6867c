"""Finds out on several nodes together that no rank makes progress, and why.

Each node whose ranks make no progress publishes one snapshot of them, and withdraws it when they do. Every node sees
the snapshots of all, so each knows when to add the stacks of its own ranks. One node judges, and announces its verdict
on all of them.
"""

from __future__ import annotations

import time
from collections import deque

from phalanx import messages
from phalanx.events import HangRecord
from phalanx.messages import Message, Seconds, Text, replace
from phalanx.status.rank_record import RankRecord
from phalanx.watchdog.exchange import Exchange
from phalanx.watchdog.stall.threshold import Observation

_SOURCE = "another node's report on its ranks"


class StallSnapshot(Message, frozen=True):
    """The ranks of one node that make no progress."""

    quiet: Seconds
    """Seconds since the last progress of any of them."""
    sightings: tuple[Observation, ...]
    records: tuple[RankRecord, ...] | None = None
    """All that is known of them, with their stacks; None as long as that has not been collected."""


class StallOver(Message, frozen=True):
    """The ranks of this node make progress again."""


class StallVerdict(Message, frozen=True):
    """A verdict, for all nodes to print and to act on."""

    lines: tuple[Text, ...]
    verdict: HangRecord | None = None
    """The record for the run directory; None when the stall is over."""
    kills: bool = False


class StallExchange:
    """The snapshots and verdicts of all nodes, in one attempt."""

    def __init__(self, exchange: Exchange) -> None:
        self.is_judge = exchange.is_judge
        self.announced: deque[StallVerdict] = deque()
        self._exchange = exchange
        exchange.receivers["stall"] = self.receive
        self._published: StallSnapshot | None = None
        self._snapshots: dict[int, tuple[StallSnapshot, float]] = {}
        """The snapshots of the other nodes, with the time when they came."""

    def publish(self, own: StallSnapshot | None) -> None:
        """Publishes the snapshot of this node if it has changed. None: the ranks make progress."""
        before, self._published = self._published, own
        if own is None:
            if before is not None:
                self._send(StallOver())
        elif before is None or (before.sightings, before.records) != (own.sightings, own.records):
            self._send(own)

    def others(self) -> list[StallSnapshot] | None:
        """Returns the snapshots of the other nodes, as of now; None if the ranks of one of them make progress."""
        if not self._snapshots.keys() >= set(self._exchange.others):
            return None
        now = time.monotonic()
        found = [self._snapshots[node] for node in self._exchange.others]
        return [
            replace(one, quiet=one.quiet + now - came, records=aged_records(one.records, now - came))
            for one, came in found
        ]

    def announce(self, verdict: StallVerdict) -> None:
        """Announces a verdict on all nodes."""
        self.announced.append(verdict)
        self._send(verdict)

    def _send(self, message: Message) -> None:
        self._exchange.publish("stall", messages.encode(message), True)

    def receive(self, node: int, body: bytes) -> None:
        """Takes a message of another node."""
        match messages.decode(body, StallSnapshot | StallOver | StallVerdict, _SOURCE):
            case StallSnapshot() as snapshot:
                self._snapshots[node] = snapshot, time.monotonic()
            case StallOver():
                self._snapshots.pop(node, None)
            case StallVerdict() as verdict if node == self._exchange.judge:
                self.announced.append(verdict)
            case _:
                pass  # only one node judges


def aged_records(records: tuple[RankRecord, ...] | None, seconds: float) -> tuple[RankRecord, ...] | None:
    """Returns the records as they are so many seconds later."""
    if records is None:
        return None
    return tuple(replace(record, quiet=record.quiet + seconds) for record in records)
