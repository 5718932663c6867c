"""The other nodes, as the agent sees them: it orders, the keeper's session carries out and reports."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from msgspec.structs import replace

from phalanx import secret
from phalanx.errors import ForeignData, LaunchError
from phalanx.events import Ending
from phalanx.fd_channel import Channel
from phalanx.launch.multinode import Loop, Note, RunOver, protocol
from phalanx.launch.multinode.protocol import NodeInfo, Terms
from phalanx.launch.spec.launch_spec import LaunchSpec, Placement, placements
from phalanx.launch.spec.network import Route
from phalanx.watchdog.exchange import Exchange, Topic

_KEEPER_GONE = "the process that communicates with the other nodes has ended; all workers are ended."
_TRUSTED = "the nodes share no secret, so everybody on their network is trusted; --secret-file gives them one"


class Peers:
    """A run on several nodes."""

    def __init__(
        self,
        spec: LaunchSpec,
        route: Route,
        keeper: Channel,
        selector: selectors.BaseSelector,
        directory: Path,
        say: Callable[[str], None],
        show: Callable[[str], bool],
        note: Note,
    ) -> None:
        self._say, self._show, self._note, self._channel = say, show, note, keeper
        fewest, most = spec.nnodes
        self._own = NodeInfo(
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
        self._terms = Terms(fewest, most, spec.rdzv_timeout, spec.last_call)
        self._endpoint = route.master, spec.master_port
        self._is_elastic = spec.rdzv_backend == "c10d"
        self._nodes: tuple[NodeInfo, ...] | None = None
        self._attempt = self._agreed = 0
        self._said_waiting = ""
        self._ignored: set[str] = set()
        self._is_last = False
        self._master: tuple[str, int] | None = None
        self._settled: list[Ending] | None = None
        self.exchange = Exchange()
        """What the watchdogs of the nodes tell each other."""
        self._has_stopped = True  # nothing has begun that could be stopped
        self.stop_reason: str | None = None
        """Why another node wants this node's ranks to be stopped."""
        self.lost: dict[int, str] = {}
        """Nodes that are gone, and how that was noticed."""
        selector.register(self._channel, selectors.EVENT_READ, self._hear)
        if secret.text() is None:
            say(_TRUSTED)

    @property
    def name(self) -> str:
        return f"node {self._own.node} (host {self._own.host})"

    @property
    def can_go_on(self) -> bool:
        """Whether another attempt makes sense. Nodes with fixed numbers need all of them for it."""
        return not self._is_last and not self._is_cut_off and (self._is_elastic or not self.lost)

    def meet(self, attempt: int, loop: Loop) -> int:
        """Meets the other nodes; returns the number of the attempt that they are about to begin."""
        if self._nodes is not None and not self._is_elastic:
            return attempt
        self._nodes = None
        self.lost.clear()
        own = replace(self._own, attempt=attempt)
        self._send(protocol.Meet(own, *self._endpoint, self._is_elastic, self._terms))
        loop(lambda: self._nodes is not None or bool(self.lost))
        if self._nodes is None:
            raise LaunchError("; ".join(self.lost.values()))
        return self._agreed

    def introduction(self) -> str | None:
        assert self._nodes is not None, "the nodes have met"
        sizes = [info.nproc for info in self._nodes]
        share = f"{sizes[0]} on each" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        ranks = f"{sum(sizes)} rank{'s' * (sum(sizes) > 1)}"
        nodes = f"{len(sizes)} node{'s' * (len(sizes) > 1)}"
        return f"{ranks} on {nodes} ({share}); this is node {self._own.node}"

    def begin(self, attempt: int, loop: Loop) -> tuple[str, int] | None:
        """Where the workers meet; None when a node was lost before all knew it."""
        assert self._nodes is not None, "the nodes have met"
        self._attempt = attempt
        self._master, self._settled, self._has_stopped, self.stop_reason = None, None, False, None
        self.exchange = Exchange(self._own.node, self._server, range(len(self._nodes)), self.lost, self._publish)
        self._send(protocol.BeginAttempt(attempt))
        loop(lambda: self._master is not None or bool(self.lost))
        return self._master

    def places(self) -> list[Placement]:
        assert self._nodes is not None, "the nodes have met"
        everyone = placements([info.nproc for info in self._nodes])
        return [place for place in everyone if place.node == self._own.node]

    def tell_stop(self, why: str, *, for_good: bool) -> None:
        if not self._has_stopped and not self._is_cut_off:
            self._has_stopped = True
            self._send(protocol.Stop(self._attempt, why, for_good))

    def settle(self, endings: list[Ending], loop: Loop) -> list[Ending]:
        if self._is_cut_off:
            return endings
        self._send(protocol.Endings(self._attempt, tuple(endings)))
        loop(lambda: self._settled is not None or self._is_cut_off)
        return self._settled if self._settled is not None else endings

    def log_of(self, ending: Ending) -> str | None:
        if self._nodes is None or ending.host == self._own.host:
            return None
        return next((f"{info.host}:{info.directory}" for info in self._nodes if info.host == ending.host), None)

    def told_as(self, directory: str) -> str:
        return f"{self._own.host}:{self._own.directory}"

    def loss(self) -> str:
        assert self._nodes is not None
        return "; ".join(f"{self._nodes[node]} is lost: {text}" for node, text in sorted(self.lost.items()))

    def close(self, exit_code: int | None) -> None:
        """Returns when the keeper has done its last duties, which takes some seconds at most.

        Without an exit code, this node leaves a run that has not ended.
        """
        protocol.send(self._channel, protocol.Leave(exit_code))
        while (event := protocol.receive_event(self._channel)) is not None:
            if isinstance(event, protocol.Goodbye):
                return

    @property
    def _server(self) -> int:
        """The node that has the store."""
        return next((info.node for info in self._nodes or () if info.serves), 0)

    @property
    def _is_cut_off(self) -> bool:
        """Without the node that has the store nobody hears anything."""
        return self._server in self.lost

    def _publish(self, topic: Topic, body: bytes, to_all: bool) -> None:
        if not self._is_cut_off:
            self._send(protocol.Published(self._attempt, topic, body, to_all))

    def _send(self, order: protocol.Order) -> None:
        try:
            protocol.send(self._channel, order)
        except OSError:
            raise LaunchError(_KEEPER_GONE) from None

    # ---- what the keeper reports

    def _hear(self) -> None:
        event = protocol.receive_event(self._channel)
        match event:
            case None:
                raise LaunchError(_KEEPER_GONE)
            case protocol.Refused(text):
                raise LaunchError(text)
            case protocol.Over(exit_code):
                raise RunOver(exit_code)
            case protocol.Waiting():
                self._say_waiting(event)
            case protocol.Notice(text):
                self._say(text)
            case protocol.Ignored(text):
                self._note("ignored", text=text)
            case protocol.Joined(node, nodes):
                self._nodes, self._own = nodes, nodes[node]
                self._agreed = max(info.attempt for info in nodes)
            case _:
                self._hear_of_attempt(event)

    def _hear_of_attempt(self, event: protocol.Event) -> None:
        match event:
            case protocol.MasterAt(attempt, address, port) if attempt == self._attempt:
                self._master = address, port
            case protocol.Stop(attempt, why, for_good) if attempt == self._attempt:
                self.stop_reason, self._is_last = why, for_good
            case protocol.Relayed(node, protocol.Published(attempt, topic, body)) if attempt == self._attempt:
                self._pass_on(node, topic, body)
            case protocol.NodeLost(node, text):
                self.lost[node] = text
            case protocol.Settled(endings):
                self._settled = list(endings)
            case _:
                pass  # about an attempt that is over

    def _pass_on(self, node: int, topic: Topic, body: bytes) -> None:
        receive = self.exchange.receivers.get(topic)
        if receive is not None:
            try:
                receive(node, body)
            except ForeignData as error:  # what explains a run is no reason to end it
                if str(error) not in self._ignored:
                    self._ignored.add(str(error))
                    self._note("ignored", text=str(error))

    def _say_waiting(self, waiting: protocol.Waiting) -> None:
        """On a terminal a line that counts the seconds; in a file one for each time that something has changed."""
        text = self._waiting_text(waiting.count, waiting.under_way)
        if not self._show(f"{text}, {waiting.waited} s") and text != self._said_waiting:
            self._say(text)
        self._said_waiting = text

    def _waiting_text(self, count: int, under_way: bool) -> str:
        fewest, most = self._terms.fewest, self._terms.most
        if under_way:
            return f"the run continues with {count} node{'s' * (count > 1)}; waiting for its next restart"
        if count >= fewest:
            return f"{count} of {fewest} to {most} nodes, a last call for more"
        return f"{count} of {fewest} nodes, waiting for {fewest - count}"
