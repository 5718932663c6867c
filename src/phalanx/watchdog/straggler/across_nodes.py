"""Collects the pace of the ranks of all nodes: each reports its own to the one that judges."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from phalanx import messages
from phalanx.messages import Count, Message, Name, Rank, Record, Seconds, Text
from phalanx.status.windows import Window
from phalanx.watchdog.exchange import Exchange
from phalanx.watchdog.straggler.conditions import Conditions

_SOURCE = "another node's report on the pace of its ranks"


class PaceReport(Message, frozen=True):
    """The pace of the ranks of one node since its last report, a few seconds ago."""

    host: Name
    windows: Mapping[int, tuple[Window, ...]]
    """The windows of each living rank."""
    conditions: Mapping[int, Conditions]
    """The conditions under which each worked, as far as they are known."""


class StragglerRecord(Record, frozen=True):
    """A rank that slows down the others, or no longer does, as the run directory keeps it."""

    said: Text
    rank: Rank
    host: Name
    is_over: bool
    slower: float
    """The part by which it is slower than the median: 0.3 is 30 %."""
    own: Seconds
    """Seconds of its own work in a step."""
    usual: Seconds
    steps: Count
    at_step: Count
    phases: tuple[Name, ...]
    conditions: Conditions | None


class StragglerVerdict(Message, frozen=True):
    """A straggler, for all nodes to print and to keep."""

    lines: tuple[Text, ...]
    straggler: StragglerRecord


class PaceExchange:
    """The reports and verdicts of all nodes, in one attempt."""

    def __init__(self, exchange: Exchange) -> None:
        self.is_judge = exchange.is_judge
        self.announced: deque[StragglerVerdict] = deque()
        self._exchange = exchange
        exchange.receivers["pace"] = self.receive
        self._reports: dict[int, PaceReport] = {}

    def report(self, own: PaceReport) -> None:
        """Sends the report of this node to the node that judges."""
        self._exchange.publish("pace", messages.encode(own), False)

    def others(self) -> list[PaceReport] | None:
        """Returns the latest report of each other node; None if one has not reported yet."""
        found = [self._reports.get(node) for node in self._exchange.others]
        return None if None in found else [one for one in found if one is not None]

    def announce(self, verdict: StragglerVerdict) -> None:
        """Announces a verdict on all nodes."""
        self.announced.append(verdict)
        self._exchange.publish("pace", messages.encode(verdict), True)

    def receive(self, node: int, body: bytes) -> None:
        """Takes a message of another node."""
        match messages.decode(body, PaceReport | StragglerVerdict, _SOURCE):
            case PaceReport() as report:
                self._reports[node] = report
            case StragglerVerdict() as verdict if node == self._exchange.judge:
                self.announced.append(verdict)
            case _:
                pass  # only one node judges
