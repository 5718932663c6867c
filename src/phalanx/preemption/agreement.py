"""The agents' side of a stop: they find a step that no rank has passed, and all ranks stop there.

The agent of the node that decides asks all nodes for the clocks of their ranks, proposes a step a little later, and
commits it when every rank has voted yes; otherwise it proposes one that is later still. A rank that has ended counts as
yes. Where ranks stay silent, all are released: then signals are delivered at once, as without an agreement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from phalanx import messages
from phalanx.errors import ForeignData
from phalanx.messages import Count, Record, StopSignal, Text
from phalanx.preemption import words
from phalanx.preemption.words import RankWords
from phalanx.status import layout
from phalanx.watchdog.exchange import Exchange

_FIRST_MARGIN = 2
_FOR_THE_DECISION = 5.0
"""Seconds that the other nodes wait longer than the one that decides."""
State = Literal["voting", "committed", "stopped", "released"]


class Clocks(Record, frozen=True, tag=True):
    """The latest stop points of one node's ranks."""

    collectives: Count
    stop_points: Count
    stands_still: bool
    can_agree: bool
    """All its ranks train, and handle the signal or ask px.stop."""
    epoch: Count
    """The number of the last proposal in their pages."""


class Request(Record, frozen=True, tag=True):
    """The ranks are to stop: the other nodes send their clocks."""

    signal: StopSignal
    reason: Text


class Proposal(Record, frozen=True, tag=True):
    epoch: Count
    step: Count
    clock: Count
    signal: StopSignal
    reason: Text


class Votes(Record, frozen=True, tag=True):
    """The votes of one node's ranks, once all are in, with their clocks."""

    epoch: Count
    are_yes: bool
    clocks: Clocks


class Commit(Record, frozen=True, tag=True):
    epoch: Count


class Release(Record, frozen=True, tag=True):
    """There is no step to agree on. ``why``: empty if the ranks do not train, or do not handle the signal."""

    why: Text
    epoch: Count


Message = Clocks | Request | Proposal | Votes | Commit | Release


class NodeVotes:
    """The ranks of this node, by the words in their status pages."""

    def __init__(self, directory: Path, ranks: Iterable[int], has_ended: Callable[[int], bool]) -> None:
        self._has_ended = has_ended
        self._ranks: dict[int, RankWords | None] = {}
        for rank in ranks:
            try:
                self._ranks[rank] = RankWords(directory, rank)
            except (OSError, ValueError):
                self._ranks[rank] = None

    @property
    def ranks(self) -> set[int]:
        return set(self._ranks)

    def _living(self) -> list[RankWords]:
        return [page for rank, page in self._ranks.items() if page is not None and not self._has_ended(rank)]

    def clocks(self, signal: int) -> Clocks:
        living = self._living()
        has_pages = all(page is not None or self._has_ended(rank) for rank, page in self._ranks.items())
        return Clocks(
            collectives=max((page[words.CLOCKS[words.COLLECTIVES]] for page in living), default=0),
            stop_points=max((page[words.CLOCKS[words.STOP_POINTS]] for page in living), default=0),
            stands_still=all(page[words.STANDS_STILL] for page in living),
            can_agree=has_pages and all(page.trains and page.stops_by(signal) for page in living),
            epoch=self.last_epoch(),
        )

    def last_epoch(self) -> int:
        """The number of the last proposal in this attempt."""
        return max((page[words.EPOCH] for page in self._living()), default=0)

    def are_handled(self, signal: int) -> bool:
        """Whether the script handles the signal itself, on any rank."""
        return any(page[words.HANDLES] >> signal & 1 for page in self._living())

    def can_stop(self, signal: int) -> bool:
        """Whether any rank handles the signal, or asks px.stop."""
        return any(page.stops_by(signal) for page in self._living())

    def step_seconds(self) -> float:
        """Seconds that the slowest rank has needed for its last step."""
        return max((page[words.INTERVAL] for page in self._living()), default=0) / 1e9

    def longest_save(self) -> float:
        """Seconds, as far as px.Checkpointer knows."""
        return max((page[layout.LONGEST_SAVE] for page in self._living()), default=0) / 1000

    def propose(self, proposal: Proposal) -> None:
        for page in self._living():
            page[words.RELEASED] = 0
            page[words.STEP], page[words.CLOCK], page[words.SIGNAL] = proposal.step, proposal.clock, proposal.signal
            page.write_reason(proposal.reason)
            page[words.EPOCH] = proposal.epoch

    def votes(self, epoch: int) -> bool | None:
        """Whether all have voted yes; None as long as some have not voted."""
        votes = [page[words.VOTE] for page in self._living()]
        return all(vote & 1 for vote in votes) if all(vote >> 1 == epoch for vote in votes) else None

    def commit(self, epoch: int) -> None:
        for page in self._living():
            page[words.COMMITTED] = epoch

    def stopped(self, epoch: int) -> set[int]:
        """The ranks that have stopped at the agreed step, or have ended."""
        return {
            rank
            for rank, page in self._ranks.items()
            if self._has_ended(rank) or (page is not None and page[words.DELIVERED] == epoch)
        }

    def release(self, epoch: int, signals: Iterable[int], stopped: set[int] | frozenset[int] = frozenset()) -> None:
        """Withdraws the last proposal; the ranks that have not stopped at it deliver these signals at once."""
        for rank, page in self._ranks.items():
            if page is not None:
                page[words.RELEASED] = 0 if rank in stopped else sum(1 << number for number in signals)
                page[words.STEP] = 0  # which every rank has passed
                page[words.EPOCH] = epoch

    def close(self) -> None:
        for page in self._ranks.values():
            if page is not None:
                page.close()


class Agreement:
    """One stop, on one node. `turn` is to be called often until `state` is stopped or released."""

    def __init__(self, votes: NodeVotes, exchange: Exchange, signal: int, reason: str, limit: float) -> None:
        """``limit``: seconds to find a step, and again for the ranks to come to it."""
        self.votes, self._exchange, self._limit = votes, exchange, limit
        self.signal, self.reason = signal, reason
        self.state: State = "voting"
        self.why_released = ""
        self.stopped: set[int] = set()
        """The ranks of this node that have stopped at the agreed step."""
        # The deciding node gives up first: a rank of another one may have voted yes for a step that is committed.
        self._until = time.monotonic() + limit + (0.0 if exchange.is_judge else _FOR_THE_DECISION)
        self._epoch = self._first_epoch = votes.last_epoch()
        self._margin = _FIRST_MARGIN
        self._voted = self._epoch
        """The last proposal that another node than the deciding one has sent its votes for."""
        self._clocks: dict[int, Clocks] = {}
        self._others_votes: dict[int, bool] = {}
        exchange.receivers["stop"] = self.receive
        self._publish(Request(signal, reason))  # to the deciding node; that one sends it to all

    def turn(self) -> None:
        if self.state == "voting":
            self._vote()
        elif self.state == "committed":
            self.stopped = self.votes.stopped(self._epoch)
            if self.votes.ranks == self.stopped:
                self.state = "stopped"
            elif time.monotonic() > self._until:
                self._release(f"a rank has not come to the agreed step within {self._limit:g} s")

    def close(self) -> None:
        self._exchange.receivers.pop("stop", None)
        self.votes.close()

    def _vote(self) -> None:
        if time.monotonic() > self._until:
            self._release(f"the ranks have not agreed on a step within {self._limit:g} s", tells=True)
        elif not self._exchange.is_judge:
            if self._voted != self._epoch and (own := self.votes.votes(self._epoch)) is not None:
                self._voted = self._epoch
                self._publish(Votes(self._epoch, own, self.votes.clocks(self.signal)))
        elif self._epoch == self._first_epoch:
            if all(node in self._clocks for node in self._exchange.others):
                self._propose()
        else:
            votes = [self.votes.votes(self._epoch), *(self._others_votes.get(node) for node in self._exchange.others)]
            if all(votes):
                self._publish(Commit(self._epoch))
                self._commit()
            elif None not in votes:
                self._margin *= 2
                self._propose()

    def _propose(self) -> None:
        """The deciding node proposes a step."""
        clocks = [self.votes.clocks(self.signal), *(self._clocks[node] for node in self._exchange.others)]
        if not all(each.can_agree for each in clocks):
            self._release("", tells=True)
            return
        is_still = all(each.stands_still for each in clocks)  # else a rank has more optimizers than the others
        latest = max(each.stop_points if is_still else each.collectives for each in clocks)
        clock = words.STOP_POINTS if is_still else words.COLLECTIVES
        epoch = max(self._epoch, *(each.epoch for each in clocks)) + 1
        proposal = Proposal(epoch, latest + self._margin, clock, self.signal, self.reason)
        self._others_votes.clear()
        self._publish(proposal)
        self._take(proposal)

    def _take(self, proposal: Proposal) -> None:
        self._epoch, self.signal, self.reason = proposal.epoch, proposal.signal, proposal.reason
        self.votes.propose(proposal)

    def _commit(self) -> None:
        self.votes.commit(self._epoch)
        self.state, self._until = "committed", time.monotonic() + self._limit

    def _release(self, why: str, *, tells: bool = False) -> None:
        """``why``: see `Release`; ``tells``: the other nodes, too."""
        if tells:
            self._publish(Release(why, self._epoch))
        self.votes.release(self._epoch + 1, [self.signal], self.stopped)
        self.state, self.why_released = "released", why

    def _publish(self, message: Message) -> None:
        self._exchange.publish("stop", messages.encode(message), self._exchange.is_judge)

    def receive(self, node: int, body: bytes) -> None:
        try:
            message = messages.decode(body, Message, f"node {node}")
        except ForeignData:
            return  # of another version, or damaged: the limit decides
        is_judge, from_judge = self._exchange.is_judge, node == self._exchange.judge
        match message:
            case Request() if from_judge:
                self._publish(self.votes.clocks(self.signal))
            case Clocks() if is_judge:
                self._clocks[node] = message
            case Votes() if is_judge and message.epoch == self._epoch:
                self._others_votes[node], self._clocks[node] = message.are_yes, message.clocks
            case Proposal() if from_judge and self.state == "voting" and message.epoch > self._epoch:
                self._take(message)
            case Commit() if from_judge and self.state == "voting" and message.epoch == self._epoch:
                self._commit()
            case Release() if self.state == "voting" and message.epoch >= self._first_epoch:
                self._release(message.why, tells=is_judge)
            case _:
                pass  # too late
