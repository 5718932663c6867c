"""The other nodes, as the agent sees them: nobody in a run of one, and otherwise what the keeper hears."""

from __future__ import annotations

import dataclasses
import selectors
import socket
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from phalanx import events
from phalanx.errors import ForeignData, LaunchError
from phalanx.launch.elastic import RunOver, Terms
from phalanx.launch.hearing import Court, Hearing
from phalanx.launch.process.zygote_client import Nursery
from phalanx.launch.rendezvous import NodeCard
from phalanx.launch.spec.launch_spec import LaunchSpec, Placement, placements
from phalanx.launch.spec.network import Route

_KEEPER_GONE = "the process that speaks with the other nodes has ended; all workers are ended."
Loop = Callable[[Callable[[], bool]], None]
"""Runs the agent's event loop until something is true."""


def new_company(
    spec: LaunchSpec,
    route: Route | None,
    nursery: Nursery,
    selector: selectors.BaseSelector,
    directory: Path,
    say: Callable[[str], None],
    show: Callable[[str], bool],
) -> Alone | Company:
    """``route``: to the other nodes, if any; ``show`` shows a line for a moment, and returns whether anybody saw it."""
    if route is None:
        return Alone(nursery, spec.nproc_per_node)
    fewest, most = spec.nnodes
    own = NodeCard(
        node=spec.node_rank,
        host=socket.gethostname(),
        address=route.address,
        nproc=spec.nproc_per_node,
        nnodes=most,
        asked=str(most) if fewest == most else f"{fewest}:{most}",
        max_restarts=spec.max_restarts,
        run_id=spec.run_id,
        torch=metadata.version("torch"),
        phalanx=metadata.version("phalanx"),
        directory=str(directory),
    )
    order = {
        "endpoint": [route.master, spec.master_port],
        "elastic": spec.rdzv_backend == "c10d",
        "terms": vars(Terms(fewest, most, spec.rdzv_timeout, spec.last_call)),
    }
    return Company(nursery, selector, own, order, say, show)


class Alone:
    """A run on one node."""

    stop_reason: str | None = None
    lost: dict[int, str] = {}  # noqa: RUF012 (it stays empty)
    name = "this node"
    can_go_on = True

    def __init__(self, nursery: Nursery, nproc: int) -> None:
        self._nursery = nursery
        self._places = placements([nproc])
        self.hearing = Hearing()

    def meet(self, attempt: int, loop: Loop) -> int:
        """There is nobody to be met."""
        return attempt

    def introduction(self) -> str | None:
        """Who takes part, when that is news."""
        return None

    def begin(self, attempt: int, loop: Loop) -> tuple[str, int]:
        """Where the workers of this attempt meet."""
        self._nursery.fresh_store()
        assert self._nursery.address is not None
        return self._nursery.address

    def places(self) -> list[Placement]:
        """Of this node's workers."""
        return self._places

    def tell_stop(self, why: str, *, for_good: bool) -> None:
        """The ranks of this node are being stopped; ``for_good``: there is to be no other attempt."""

    def settle(self, endings: list[events.Ending], loop: Loop) -> list[events.Ending]:
        """How the ranks of all nodes ended."""
        return endings

    def loss(self) -> str:
        """What to say of nodes that are gone."""
        return ""

    def log_of(self, ending: events.Ending) -> str | None:
        """The run directory with a rank's log, when it is on another node."""
        return None

    def told_as(self, directory: str) -> str:
        """A directory of this node, as all consoles of the run can tell it."""
        return directory

    def close(self, exit_code: int | None) -> None:
        pass


class Company:
    """A run on several nodes."""

    def __init__(
        self,
        nursery: Nursery,
        selector: selectors.BaseSelector,
        own: NodeCard,
        order: dict[str, Any],
        say: Callable[[str], None],
        show: Callable[[str], bool],
    ) -> None:
        """``order``: what the keeper is told to meet the others."""
        self._nursery, self._own, self._say, self._show = nursery, own, say, show
        self._channel = nursery.keeper
        self._order = order
        self._is_elastic: bool = order["elastic"]
        self._cards: list[NodeCard] | None = None
        self._agreed_attempt = self._attempt = 0
        self._said_waiting = ""
        self._ignored: set[str] = set()
        self._stopped_for_good = False
        self._master: tuple[str, int] | None = None
        self._settled: list[events.Ending] | None = None
        self.hearing: Hearing = Hearing()
        """Where the nodes find out why all ranks stand still."""
        self._told = True  # nothing has begun that could be stopped
        self.stop_reason: str | None = None
        """What another node has said for this node's ranks to be stopped."""
        self.lost: dict[int, str] = {}
        """Nodes that are gone, and how that was seen."""
        selector.register(self._channel, selectors.EVENT_READ, self._hear)

    @property
    def name(self) -> str:
        return f"node {self._own.node} (host {self._own.host})"

    @property
    def can_go_on(self) -> bool:
        """Whether another attempt makes sense. Nodes with fixed numbers can only go on when all are there."""
        return not self._stopped_for_good and not self._is_cut_off and (self._is_elastic or not self.lost)

    def meet(self, attempt: int, loop: Loop) -> int:
        """The other nodes; the number of the attempt that they are about to begin."""
        if self._cards is not None and not self._is_elastic:
            return attempt
        self._cards = None
        self.lost.clear()
        self._send({"op": "meet", "card": vars(dataclasses.replace(self._own, attempt=attempt)), **self._order})
        loop(lambda: self._cards is not None or bool(self.lost))
        if self._cards is None:
            raise LaunchError("; ".join(self.lost.values()))
        return self._agreed_attempt

    def introduction(self) -> str | None:
        assert self._cards is not None, "the nodes have met"
        sizes = [card.nproc for card in self._cards]
        share = f"{sizes[0]} on each" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        ranks = f"{sum(sizes)} rank{'s' * (sum(sizes) > 1)}"
        nodes = f"{len(sizes)} node{'s' * (len(sizes) > 1)}"
        return f"{ranks} on {nodes} ({share}); this is node {self._own.node}"

    def begin(self, attempt: int, loop: Loop) -> tuple[str, int] | None:
        """None when a node was lost before all knew where."""
        self._master, self._settled, self._told, self.stop_reason = None, None, False, None
        self.hearing = self._new_court(attempt)
        self._send({"op": "attempt", "number": attempt})
        loop(lambda: self._master is not None or bool(self.lost))
        return self._master

    def places(self) -> list[Placement]:
        assert self._cards is not None, "the nodes have met"
        everyone = placements([card.nproc for card in self._cards])
        return [place for place in everyone if place.node == self._own.node]

    def tell_stop(self, why: str, *, for_good: bool) -> None:
        if not self._told and not self._is_cut_off:
            self._told = True
            self._send({"op": "stop", "why": why, "for_good": for_good})

    def settle(self, endings: list[events.Ending], loop: Loop) -> list[events.Ending]:
        if self._is_cut_off:
            return endings
        self._send({"op": "endings", "endings": [dataclasses.asdict(ending) for ending in endings]})
        loop(lambda: self._settled is not None or self._is_cut_off)
        return self._settled if self._settled is not None else endings

    def log_of(self, ending: events.Ending) -> str | None:
        if self._cards is None or ending.host == self._own.host:
            return None
        return next((f"{card.host}:{card.directory}" for card in self._cards if card.host == ending.host), None)

    def told_as(self, directory: str) -> str:
        return f"{self._own.host}:{self._own.directory}"

    def loss(self) -> str:
        assert self._cards is not None
        return "; ".join(f"{self._cards[node]} is lost: {text}" for node, text in sorted(self.lost.items()))

    def close(self, exit_code: int | None) -> None:
        """Returns when the keeper has done its last duties, which takes some seconds at most.

        Without an exit code, this node leaves a run that has not ended.
        """
        self._channel.send({"op": "bye", "exit_code": exit_code})
        while (received := self._channel.receive()) is not None:
            if received[0]["event"] == "goodbye":
                return

    @property
    def _server(self) -> int:
        """The node that has the store."""
        return next((card.node for card in self._cards or () if card.serves), 0)

    @property
    def _is_cut_off(self) -> bool:
        """Without the node that has the store nobody can be told anything."""
        return self._server in self.lost

    def _new_court(self, attempt: int) -> Hearing:
        def write(entry: str, *arguments: object) -> None:
            if not self._is_cut_off:
                self._send({"op": "docket", "attempt": attempt, "entry": entry, "arguments": arguments})

        self._attempt = attempt
        return Court(self._own.node, self._server, range(len(self._cards or ())), self.lost, write)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise LaunchError(_KEEPER_GONE) from None

    # ---- what the keeper says

    def _hear(self) -> None:
        received = self._channel.receive()
        if received is None:
            raise LaunchError(_KEEPER_GONE)
        message, _ = received
        getattr(self, f"_on_{message['event']}")(message)

    def _on_waiting(self, message: dict[str, Any]) -> None:
        """On a terminal a line that counts the seconds; in a file one for each time that something has changed."""
        text = self._waiting_text(message["came"], message["under_way"])
        if not self._show(f"{text}, {message['waited']} s") and text != self._said_waiting:
            self._say(text)
        self._said_waiting = text

    def _waiting_text(self, came: int, under_way: bool) -> str:
        fewest, most = self._order["terms"]["fewest"], self._order["terms"]["most"]
        if under_way:
            return f"the run goes on with {came} node{'s' * (came > 1)}; waiting for its next restart"
        if came >= fewest:
            return f"{came} of {fewest} to {most} nodes, a last call for more"
        return f"{came} of {fewest} nodes, waiting for {fewest - came}"

    def _on_note(self, message: dict[str, Any]) -> None:
        self._say(message["text"])

    def _on_met(self, message: dict[str, Any]) -> None:
        self._cards = [NodeCard(**card) for card in message["cards"]]
        self._own = self._cards[message["node"]]
        self._agreed_attempt = max(card.attempt for card in self._cards)

    def _on_refused(self, message: dict[str, Any]) -> None:
        raise LaunchError(message["text"])

    def _on_over(self, message: dict[str, Any]) -> None:
        raise RunOver(message["exit_code"])

    def _on_master(self, message: dict[str, Any]) -> None:
        self._master = message["address"], message["port"]

    def _on_stop(self, message: dict[str, Any]) -> None:
        self.stop_reason, self._stopped_for_good = message["why"], message["for_good"]

    def _on_hearing(self, message: dict[str, Any]) -> None:
        if message["attempt"] == self._attempt:  # else it comes late
            try:
                getattr(self.hearing, f"on_{message['what']}")(**message["fields"])
            except ForeignData as error:  # what explains a run is no reason to end it
                if str(error) not in self._ignored:
                    self._ignored.add(str(error))
                    self._say(f"{error} It is ignored.")

    def _on_lost(self, message: dict[str, Any]) -> None:
        self.lost[message["node"]] = message["text"]

    def _on_settled(self, message: dict[str, Any]) -> None:
        found: Sequence[list[dict[str, Any]]] = message["endings"].values()
        self._settled = [events.ending_from_fields(fields) for endings in found for fields in endings]
