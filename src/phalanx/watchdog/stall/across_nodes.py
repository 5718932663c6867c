"""How the nodes of a run find out together that all ranks stand still, and why.

Each node whose ranks make no progress publishes one snapshot of them, and withdraws it when they do. Every node sees
those of all others, so each knows when to add the stacks of its own ranks; one node judges, and its verdict is
announced on all of them in the same words.
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
    """Since the last progress of any of them."""
    sightings: tuple[Observation, ...]
    records: tuple[RankRecord, ...] | None = None
    """All that is known of them, with their stacks; None: that has not been looked at yet."""


class StallOver(Message, frozen=True):
    """The ranks of this node make progress again."""


class StallVerdict(Message, frozen=True):
    """What all nodes print, and do."""

    lines: tuple[Text, ...]
    verdict: HangRecord | None = None
    """What is kept of it in the run's files; None: the stall is over."""
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
        """Of the other nodes, with the time when they came."""

    def publish(self, own: StallSnapshot | None) -> None:
        """Only when something has changed: that time passes everybody knows. None: the ranks make progress."""
        before, self._published = self._published, own
        if own is None:
            if before is not None:
                self._send(StallOver())
        elif before is None or (before.sightings, before.records) != (own.sightings, own.records):
            self._send(own)

    def others(self) -> list[StallSnapshot] | None:
        """What the other nodes say, as of now; None: the ranks of one of them make progress."""
        if not self._snapshots.keys() >= set(self._exchange.others):
            return None
        now = time.monotonic()
        found = [self._snapshots[node] for node in self._exchange.others]
        return [_aged(snapshot, now - came) for snapshot, came in found]

    def announce(self, verdict: StallVerdict) -> None:
        """On all nodes."""
        self.announced.append(verdict)
        self._send(verdict)

    def _send(self, message: Message) -> None:
        self._exchange.publish("stall", messages.encode(message), True)

    def receive(self, node: int, body: bytes) -> None:
        """What another node has published."""
        match messages.decode(body, StallSnapshot | StallOver | StallVerdict, _SOURCE):
            case StallSnapshot() as snapshot:
                self._snapshots[node] = snapshot, time.monotonic()
            case StallOver():
                self._snapshots.pop(node, None)
            case StallVerdict() as verdict if node == self._exchange.judge:
                self.announced.append(verdict)
            case _:
                pass  # only one node judges


def _aged(snapshot: StallSnapshot, seconds: float) -> StallSnapshot:
    return replace(snapshot, quiet=snapshot.quiet + seconds, records=aged_records(snapshot.records, seconds))


def aged_records(records: tuple[RankRecord, ...] | None, seconds: float) -> tuple[RankRecord, ...] | None:
    """The same, so much later."""
    if records is None:
        return None
    return tuple(replace(record, quiet=record.quiet + seconds) for record in records)
