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
from phalanx.errors import LaunchError
from phalanx.launch.network import Route
from phalanx.launch.nursery import Nursery
from phalanx.launch.rendezvous import NodeCard
from phalanx.launch.spec import LaunchSpec, Placement, placements

Loop = Callable[[Callable[[], bool]], None]
"""Runs the agent's event loop until something is true."""


def new_company(
    spec: LaunchSpec,
    route: Route | None,
    nursery: Nursery,
    selector: selectors.BaseSelector,
    directory: Path,
    show: Callable[[str], None],
) -> Alone | Company:
    """``route`` leads to the other nodes, if there are any; ``show`` shows a line for a moment."""
    if route is None:
        return Alone(nursery, spec.nproc_per_node)
    own = NodeCard(
        node=spec.node_rank,
        host=socket.gethostname(),
        address=route.address,
        nproc=spec.nproc_per_node,
        nnodes=spec.nnodes[1],
        max_restarts=spec.max_restarts,
        run_id=spec.run_id,
        torch=metadata.version("torch"),
        phalanx=metadata.version("phalanx"),
        directory=str(directory),
    )
    return Company(nursery, selector, own, (route.master, spec.master_port), spec.rdzv_timeout, show)


class Alone:
    """A run on one node."""

    stop_reason: str | None = None
    lost: dict[int, str] = {}  # noqa: RUF012 (it stays empty)

    def __init__(self, nursery: Nursery, nproc: int) -> None:
        self._nursery = nursery
        self._places = placements([nproc])

    def meet(self, loop: Loop) -> None:
        """There is nobody to be met."""

    def begin(self, attempt: int, loop: Loop) -> tuple[str, int]:
        """Where the workers of this attempt meet."""
        self._nursery.fresh_store(wait=attempt > 0)
        assert self._nursery.address is not None
        return self._nursery.address

    def places(self) -> list[Placement]:
        """Of this node's workers."""
        return self._places

    def tell_stop(self, why: str) -> None:
        """The ranks of this node are being stopped."""

    def settle(self, endings: list[events.Ending], loop: Loop) -> list[events.Ending]:
        """How the ranks of all nodes ended."""
        return endings

    def loss(self) -> str:
        """What to say of nodes that are gone."""
        return ""

    def log_of(self, ending: events.Ending) -> str | None:
        """Where a rank's log is, when it is on another node."""
        return None

    def close(self) -> None:
        pass


class Company:
    """A run on several nodes."""

    def __init__(
        self,
        nursery: Nursery,
        selector: selectors.BaseSelector,
        own: NodeCard,
        endpoint: tuple[str, int],
        timeout: float,
        show: Callable[[str], None],
    ) -> None:
        self._nursery, self._own, self._show = nursery, own, show
        self._channel = nursery.keeper
        self._order = {"card": vars(own), "endpoint": list(endpoint), "timeout": timeout}
        self._cards: list[NodeCard] | None = None
        self._master: tuple[str, int] | None = None
        self._settled: list[events.Ending] | None = None
        self._told = True  # nothing has begun that could be stopped
        self.stop_reason: str | None = None
        """What another node has said for this node's ranks to be stopped."""
        self.lost: dict[int, str] = {}
        """Nodes that are gone, and how that was seen."""
        selector.register(self._channel, selectors.EVENT_READ, self._hear)

    def meet(self, loop: Loop) -> None:
        self._channel.send({"op": "meet", **self._order})
        loop(lambda: self._cards is not None or bool(self.lost))
        if self._cards is None:
            raise LaunchError("; ".join(self.lost.values()))

    def begin(self, attempt: int, loop: Loop) -> tuple[str, int]:
        self._master, self._settled, self._told, self.stop_reason = None, None, False, None
        self._channel.send({"op": "attempt", "number": attempt})
        loop(lambda: self._master is not None or bool(self.lost))
        if self._master is None:
            raise LaunchError(self.loss())
        return self._master

    def places(self) -> list[Placement]:
        assert self._cards is not None, "the nodes have met"
        everyone = placements([card.nproc for card in self._cards])
        return [place for place in everyone if place.node == self._own.node]

    def tell_stop(self, why: str) -> None:
        if not self._told and not self._is_cut_off:
            self._told = True
            self._channel.send({"op": "stop", "why": why})

    def settle(self, endings: list[events.Ending], loop: Loop) -> list[events.Ending]:
        if self._is_cut_off:
            return endings
        self._channel.send({"op": "endings", "endings": [dataclasses.asdict(ending) for ending in endings]})
        loop(lambda: self._settled is not None or 0 in self.lost)
        return self._settled if self._settled is not None else endings

    def log_of(self, ending: events.Ending) -> str | None:
        if self._cards is None or ending.host == self._own.host:
            return None
        return next((f"{card.host}:{card.directory}" for card in self._cards if card.host == ending.host), None)

    def loss(self) -> str:
        assert self._cards is not None
        return "; ".join(f"{self._cards[node]} is lost: {text}" for node, text in sorted(self.lost.items()))

    def close(self) -> None:
        """Returns when the keeper has done its last duties, which takes some seconds at most."""
        self._channel.send({"op": "bye"})
        while (received := self._channel.receive()) is not None:
            if received[0]["event"] == "goodbye":
                return

    @property
    def _is_cut_off(self) -> bool:
        """The first node has the store: without it nobody can be told anything."""
        return 0 in self.lost

    # ---- what the keeper says

    def _hear(self) -> None:
        received = self._channel.receive()
        if received is None:
            raise LaunchError("the process that speaks with the other nodes has ended; all workers are ended.")
        message, _ = received
        getattr(self, f"_on_{message['event']}")(message)

    def _on_waiting(self, message: dict[str, Any]) -> None:
        nodes, came = self._own.nnodes, message["came"]
        self._show(f"{came} of {nodes} nodes, waiting for {nodes - came}, {message['waited']} s")

    def _on_met(self, message: dict[str, Any]) -> None:
        self._cards = [NodeCard(**card) for card in message["cards"]]

    def _on_refused(self, message: dict[str, Any]) -> None:
        raise LaunchError(message["text"])

    def _on_master(self, message: dict[str, Any]) -> None:
        self._master = message["address"], message["port"]

    def _on_stop(self, message: dict[str, Any]) -> None:
        self.stop_reason = message["why"]

    def _on_lost(self, message: dict[str, Any]) -> None:
        self.lost[message["node"]] = message["text"]

    def _on_settled(self, message: dict[str, Any]) -> None:
        found: Sequence[list[dict[str, Any]]] = message["endings"].values()
        self._settled = [events.ending_from_fields(fields) for endings in found for fields in endings]
