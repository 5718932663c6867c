"""The agent's side of a run on several nodes: it sends orders to its keeper, whose session executes and reports."""

from __future__ import annotations

import selectors
import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from msgspec.structs import replace

from phalanx import secret
from phalanx.errors import ForeignData, LaunchError
from phalanx.events import Ending
from phalanx.fd_channel import Channel
from phalanx.launch.multinode import Note, RunOver, RunUntil, protocol
from phalanx.launch.multinode.protocol import NodeInfo, Terms
from phalanx.launch.spec.launch_spec import LaunchSpec, Placement, placements
from phalanx.launch.spec.network import Route, is_own
from phalanx.watchdog.exchange import Exchange, Topic

_KEEPER_GONE = "the process that communicates with the other nodes has ended; all workers are ended."
_TRUSTED = "the nodes share no secret, so everybody on their network is trusted; --secret-file gives them one"


@dataclass
class _Attempt:
    """The messages about one attempt, which may arrive before this node begins it."""

    master: tuple[str, int] | None = None
    stop: protocol.Stop | None = None
    """The first one of another node, unless this node was the first."""
    has_stopped: bool = False
    """This node has stopped the others."""
    endings: dict[int, tuple[Ending, ...]] = field(default_factory=dict)


class Peers:
    """The nodes of a run, as the agent of one of them sees them. `SingleNode` is the same for a run on one node."""

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
        # By its name: after a restart the master may have another address.
        self._endpoint = route.master if is_own(route.master) else spec.master_addr, spec.master_port
        self._is_elastic = spec.rdzv_backend == "c10d"
        self._is_task = spec.task_place is not None
        self._nodes: tuple[NodeInfo, ...] | None = None
        self._attempt = self._agreed = 0
        self._printed_waiting = ""
        self._ignored: set[str] = set()
        self._attempts: defaultdict[int, _Attempt] = defaultdict(_Attempt)
        self._now = _Attempt(has_stopped=True)  # nothing has begun that could be stopped
        self.exchange = Exchange()
        """The messages between the watchdogs of the nodes."""
        self.lost: dict[int, str] = {}
        """Nodes that are lost, and how that was noticed."""
        selector.register(self._channel, selectors.EVENT_READ, self._receive)
        if secret.text() is None and not spec.shares_console:
            say(_TRUSTED)

    @property
    def name(self) -> str:
        return f"node {self._own.node} (host {self._own.host})"

    @property
    def is_first(self) -> bool:
        """This is the node of rank 0."""
        return self._own.node == 0

    @property
    def stop_reason(self) -> str | None:
        """The reason for which another node stops the ranks of this one."""
        return self._now.stop.why if self._now.stop is not None else None

    @property
    def can_restart(self) -> bool:
        """Another attempt is possible. With a fixed number of nodes it needs all of them."""
        is_last = self._now.stop is not None and self._now.stop.for_good
        return not is_last and not self._is_cut_off and (self._is_elastic or not self.lost)

    def meet(self, attempt: int, run_until: RunUntil) -> int:
        """Joins the other nodes. Returns the number of the attempt that they are about to begin."""
        if self._nodes is not None and not self._is_elastic:
            return attempt
        self._nodes = None
        self.lost.clear()
        own = replace(self._own, attempt=attempt)
        self._send(protocol.Meet(own, *self._endpoint, self._is_elastic, self._terms))
        run_until(lambda: self._nodes is not None or bool(self.lost))
        if self._nodes is None:
            raise LaunchError("; ".join(self.lost.values()))
        return self._agreed

    def introduction(self) -> str | None:
        assert self._nodes is not None, "the nodes have met"
        sizes = [info.nproc for info in self._nodes]
        share = f"{sizes[0]} on each" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        ranks = f"{sum(sizes)} rank{'s' * (sum(sizes) > 1)}"
        if self._is_task:
            return f"{ranks}, one in each task of srun"
        nodes = f"{len(sizes)} node{'s' * (len(sizes) > 1)}"
        return f"{ranks} on {nodes} ({share}); this is node {self._own.node}"

    def begin(self, attempt: int, run_until: RunUntil) -> tuple[str, int] | None:
        """Returns the address of the workers' store; None if a node was lost before all knew it."""
        assert self._nodes is not None, "the nodes have met"
        for over in [number for number in self._attempts if number < attempt]:
            del self._attempts[over]
        self._attempt, self._now = attempt, self._attempts[attempt]
        self.exchange = Exchange(self._own.node, self._server, range(len(self._nodes)), self.lost, self._publish)
        if self._own.node == 0:
            self._send(protocol.OpenMaster(attempt))
        run_until(lambda: self._now.master is not None or bool(self.lost))
        return self._now.master

    def places(self) -> list[Placement]:
        assert self._nodes is not None, "the nodes have met"
        everyone = placements([info.nproc for info in self._nodes])
        return [place for place in everyone if place.node == self._own.node]

    def stop_others(self, why: str, *, for_good: bool) -> None:
        if not self._now.has_stopped and not self._is_cut_off:
            self._now.has_stopped = True
            self._send(protocol.Stop(self._attempt, why, for_good))

    def settle(self, endings: list[Ending], run_until: RunUntil) -> list[Ending]:
        if self._is_cut_off:
            return endings
        known, nodes = self._now.endings, len(self._nodes or ())
        known[self._own.node] = tuple(endings)
        self._send(protocol.Endings(self._attempt, tuple(endings)))

        def is_settled() -> bool:
            return len(known.keys() | self.lost.keys()) >= nodes

        run_until(lambda: is_settled() or self._is_cut_off)
        return [ending for _, found in sorted(known.items()) for ending in found] if is_settled() else endings

    def log_of(self, ending: Ending) -> str | None:
        everyone = placements([info.nproc for info in self._nodes or ()])
        info = next((self._nodes[place.node] for place in everyone if self._nodes and place.rank == ending.rank), None)
        if info is None or info.node == self._own.node:
            return None
        # srun can start several agents on a machine.
        return info.directory if info.host == self._own.host else f"{info.host}:{info.directory}"

    def directory_label(self, directory: str) -> str:
        return f"{self._own.host}:{self._own.directory}"

    def loss(self) -> str:
        assert self._nodes is not None
        return "; ".join(f"{self._nodes[node]} is lost: {text}" for node, text in sorted(self.lost.items()))

    def close(self, exit_code: int | None) -> None:
        """Leaves the run and waits for the keeper's session to end, some seconds at most.

        Without an exit code, this node leaves a run that has not ended.
        """
        self._channel.send(protocol.Leave(exit_code))
        while (event := protocol.receive_event(self._channel)) is not None:
            if isinstance(event, protocol.Goodbye):
                return

    @property
    def _server(self) -> int:
        """The number of the node that serves the store."""
        return next((info.node for info in self._nodes or () if info.serves), 0)

    @property
    def _is_cut_off(self) -> bool:
        """The serving node is lost, so no message arrives any more."""
        return self._server in self.lost

    def _publish(self, topic: Topic, body: bytes, to_all: bool) -> None:
        if not self._is_cut_off:
            self._send(protocol.Published(self._attempt, topic, body, to_all))

    def _send(self, order: protocol.Order) -> None:
        try:
            self._channel.send(order)
        except OSError:
            raise LaunchError(_KEEPER_GONE) from None

    # ---- events of the keeper

    def _receive(self) -> None:
        event = protocol.receive_event(self._channel)
        match event:
            case None:
                raise LaunchError(_KEEPER_GONE)
            case protocol.Refused(text):
                raise LaunchError(text)
            case protocol.Over(exit_code):
                raise RunOver(exit_code)
            case protocol.Waiting():
                self._print_waiting(event)
            case protocol.Notice(text):
                self._say(text)
            case protocol.Ignored(text):
                self._note("ignored", text=text)
            case protocol.Joined(node, nodes):
                self._nodes, self._own = nodes, nodes[node]
                self._agreed = max(info.attempt for info in nodes)
            case protocol.Met():
                self._attempts.clear()
            case protocol.NodeLost(node, text):
                self.lost.setdefault(node, text)
            case protocol.Relayed(node, post):
                self._receive_post(node, post)
            case protocol.Goodbye():
                pass  # `close` waits for it

    def _receive_post(self, node: int, post: protocol.Post) -> None:
        attempt = self._attempts[post.attempt]
        match post:
            case protocol.MasterAt(_, address, port) if node == 0:
                attempt.master = address, port
            case protocol.Stop() if attempt.stop is None and not attempt.has_stopped:
                attempt.stop = post
            case protocol.Endings(endings=endings):
                attempt.endings[node] = endings
            case protocol.Published(_, topic, body) if attempt is self._now:
                self._deliver(node, topic, body)
            case _:
                pass  # not the first reason to stop, or about an attempt that is over

    def _deliver(self, node: int, topic: Topic, body: bytes) -> None:
        receive = self.exchange.receivers.get(topic)
        if receive is not None:
            try:
                receive(node, body)
            except ForeignData as error:  # a watchdog's message is no reason to end a run
                if str(error) not in self._ignored:
                    self._ignored.add(str(error))
                    self._note("ignored", text=str(error))

    def _print_waiting(self, waiting: protocol.Waiting) -> None:
        """Updates one line on a terminal; in a file prints a line whenever something has changed."""
        text = self._waiting_text(waiting.count, waiting.under_way)
        if not self._show(f"{text}, {waiting.waited} s") and text != self._printed_waiting:
            self._say(text)
        self._printed_waiting = text

    def _waiting_text(self, count: int, under_way: bool) -> str:
        fewest, most = self._terms.fewest, self._terms.most
        if under_way:
            return f"the run continues with {count} node{'s' * (count > 1)}; waiting for its next restart"
        if count >= fewest:
            return f"{count} of {fewest} to {most} nodes, a last call for more"
        return f"{count} of {fewest} nodes, waiting for {fewest - count}"
