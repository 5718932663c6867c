"""The pace of the ranks of all nodes: each reports its own to the one that compares them."""

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
    """The ranks of one node since its last report, a few seconds ago."""

    host: Name
    windows: Mapping[int, tuple[Window, ...]]
    """Of each rank that lives."""
    conditions: Mapping[int, Conditions]
    """Under which it worked, as far as that is known."""


class StragglerRecord(Record, frozen=True):
    """What a run keeps of a rank that holds up the others, or no longer does."""

    said: Text
    rank: Rank
    host: Name
    is_over: bool
    slower: float
    """0.3: its own work takes 30 % longer than that of the median."""
    own: Seconds
    """Its own work in a step."""
    usual: Seconds
    steps: Count
    at_step: Count
    phases: tuple[Name, ...]
    conditions: Conditions | None


class StragglerVerdict(Message, frozen=True):
    """What all nodes print and keep."""

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
        """To the node that judges."""
        self._exchange.publish("pace", messages.encode(own), False)

    def others(self) -> list[PaceReport] | None:
        """The latest of each other node; None: there is one that has not reported yet."""
        found = [self._reports.get(node) for node in self._exchange.others]
        return None if None in found else [one for one in found if one is not None]

    def announce(self, verdict: StragglerVerdict) -> None:
        """On all nodes."""
        self.announced.append(verdict)
        self._exchange.publish("pace", messages.encode(verdict), True)

    def receive(self, node: int, body: bytes) -> None:
        """What another node has published."""
        match messages.decode(body, PaceReport | StragglerVerdict, _SOURCE):
            case PaceReport() as report:
                self._reports[node] = report
            case StragglerVerdict() as verdict if node == self._exchange.judge:
                self.announced.append(verdict)
            case _:
                pass  # only one node judges
