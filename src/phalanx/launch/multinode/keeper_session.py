"""The keeper's part in a run of several nodes: it joins the other nodes for its agent, and relays their messages.

A store behind a broken connection answers after many minutes, or never. So the thread that reads from the agent never
uses it: a second thread executes the agent's orders, and a third runs the connections to the other nodes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from msgspec.structs import replace

from phalanx import run_files
from phalanx.errors import JoinError, PhalanxError
from phalanx.events import KEEPER_LOG
from phalanx.fd_channel import Channel
from phalanx.launch.multinode import RunOver, protocol, rendezvous
from phalanx.launch.multinode.hub import Hub, Spoke
from phalanx.launch.multinode.links import SILENCE, ServerLost
from phalanx.launch.multinode.protocol import LinkMessage, NodeInfo, NodesMissing, Order, Terms
from phalanx.store import tcp_store
from phalanx.system import ports

if TYPE_CHECKING:
    from torch.distributed import Store

    from phalanx.launch.multinode.elastic import ElasticRendezvous

_LEAVE_SECONDS = 5.0
_REFUSAL_SECONDS = 1.0
"""Seconds for the other nodes to read why the run cannot begin."""
_MOST_IGNORED = 20
"""Lines in the event file about messages from outside the run."""


class KeeperSession:
    """The session of one node with the others. It reports to the agent by events."""

    def __init__(self, channel: Channel, listener: socket.socket | None) -> None:
        """``listener``: this node serves the store, behind it."""
        self._channel, self._listener = channel, listener
        self._sending = threading.Lock()
        self._store: Store | None = None
        self._hosted: Store | None = None
        self._rendezvous = rendezvous.Rendezvous(self._receive)
        self._elastic: ElasticRendezvous | None = None
        self._own = -1
        self._nodes: tuple[NodeInfo, ...] = ()
        self._ignored: set[str] = set()
        self._outcome: SimpleQueue[int] = SimpleQueue()
        """The exit code of a run that ended without this node."""
        self._workers: tuple[socket.socket, Store] | None = None
        """The socket of the workers' store and the store, on the first node."""
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._is_complete = threading.Event()
        """No other node can join any more."""
        self._is_over = threading.Event()
        self._has_finished = threading.Event()

    def serve(self) -> None:
        """Runs until the agent leaves or dies, and lets the other nodes know."""
        _move_stderr()
        threading.Thread(target=self._run_orders, name="keeper-session", daemon=True).start()
        order: Order | None = None
        while not isinstance(order, protocol.Leave):
            order = protocol.receive_order(self._channel)
            self._orders.put(order)
        self._rendezvous.is_leaving.set()
        # Not longer: the store may have stopped answering.
        self._has_finished.wait(_LEAVE_SECONDS + 1.0 if self._nodes else 1.0)
        self._is_over.set()
        self._is_complete.set()
        self._report(protocol.Goodbye())

    def _run_orders(self) -> None:
        order: Order | None = None
        while not isinstance(order, protocol.Leave):
            order = self._orders.get()
            try:
                self._execute(order)
            except PhalanxError as error:
                if self._hosted is not None:
                    self._is_over.wait(_REFUSAL_SECONDS)
                self._report(protocol.Refused(str(error)))
            except RunOver as over:
                self._report(protocol.Over(over.exit_code))
            except OSError as error:  # there is no port or descriptor left
                self._report(protocol.Refused(f"this node cannot listen for the others: {error.strerror}."))
            except RuntimeError as error:
                self._lose_server(f"its store does not answer ({str(error).splitlines()[0]})")
        self._has_finished.set()

    def _execute(self, order: Order) -> None:
        match order:
            case protocol.Meet():
                self._join(order)
            case protocol.OpenMaster(attempt):
                self._open_master(attempt)
            case protocol.Stop() | protocol.Endings() | protocol.Published():
                self._link.post(order)
            case protocol.Leave(exit_code):
                self._leave(exit_code)

    # ---- the agent's orders

    def _join(self, order: protocol.Meet) -> None:
        info, terms = replace(order.info, serves=self._listener is not None), order.terms
        if order.elastic:
            info = replace(info, node=-1)
        if self._store is None:
            self._open(order, info)
        if order.elastic:
            self._join_elastic(info, terms)
        else:
            self._own = info.node
            self._rendezvous.sign_in("run", info, terms.timeout, self._report_waiting)
            self._is_complete.set()
        self._report(protocol.Joined(self._own, self._nodes))

    def _open(self, order: protocol.Meet, info: NodeInfo) -> None:
        timeout = order.terms.timeout
        if self._listener is not None:
            self._hosted = tcp_store.serve(order.host, self._listener, timeout=60.0)
            address = self._listener.getsockname()[0]
            hub = Hub(ports.listen(address, 0), info, order.elastic, self._rendezvous.receive)
            self._rendezvous.serve(hub)
            advertising = self._hosted, address, hub.port, self._is_complete
            threading.Thread(target=rendezvous.advertise, args=advertising, name="hub-address", daemon=True).start()

        def notify(text: str) -> None:
            self._report(protocol.Notice(text))

        store = tcp_store.connect(order.host, order.port, timeout, notify)
        if self._listener is None:
            self._rendezvous.connect(store, order.host, info, timeout, notify)
        self._store = store

    def _join_elastic(self, info: NodeInfo, terms: Terms) -> None:
        """Repeats the rendezvous until all of its nodes have signed in, too: one may have died in between."""
        if self._elastic is None:
            from phalanx.launch.multinode.elastic import ElasticRendezvous  # which imports torch.distributed.elastic

            assert self._store is not None
            self._elastic = ElasticRendezvous(self._store, info, terms, self._report_waiting, self._outcome)
        while True:
            try:
                name, self._own, nodes = self._elastic.next_round()
            except JoinError as error:
                raise JoinError(f"{error}{self._link.secret_hint()}") from None
            own = replace(info, node=self._own, nnodes=nodes)
            with contextlib.suppress(NodesMissing):
                self._rendezvous.sign_in(name, own, SILENCE + _LEAVE_SECONDS, lambda count, waited: None)
                return

    def _report_waiting(self, count: int, waited: int, under_way: bool = False) -> None:
        self._report(protocol.Waiting(count, waited, under_way))

    def _open_master(self, number: int) -> None:
        """Opens the workers' store of an attempt, on the first node."""
        if self._workers is not None:
            self._workers[0].close()
        self._workers = None  # its connections close before the next one is there
        address = self._nodes[0].address
        listener = ports.listen(address, 0)
        self._workers = listener, tcp_store.serve(address, listener, timeout=60.0)
        master = protocol.MasterAt(number, address, listener.getsockname()[1])
        self._report(protocol.Relayed(0, master))
        self._link.post(master)

    def _leave(self, exit_code: int | None) -> None:
        """Leaves the run. The serving node stays until the others know of its end."""
        if self._rendezvous.link is None:
            return
        if exit_code is not None and self._listener is not None and self._elastic is not None:
            self._elastic.close()
        self._link.leave(exit_code, _LEAVE_SECONDS if exit_code is not None else 1.0)

    # ---- messages of the other nodes, on the connections' thread

    def _receive(self, message: LinkMessage | protocol.Ignored | ServerLost) -> None:
        match message:
            case protocol.Met(nodes=nodes):
                self._nodes = nodes
                self._report(message)
            case protocol.Relayed() | protocol.NodeLost():
                self._report(message)
            case ServerLost(text):
                self._lose_server(text)
            case protocol.Over(exit_code):
                self._outcome.put(exit_code)
            case protocol.Ignored(text) if text not in self._ignored and len(self._ignored) < _MOST_IGNORED:
                self._ignored.add(text)
                self._report(message)
            case _:
                pass  # of no interest any more

    # ---- to the agent

    def _lose_server(self, text: str) -> None:
        self._report(protocol.NodeLost(next((info.node for info in self._nodes if info.serves), 0), text))

    @property
    def _link(self) -> Hub | Spoke:
        assert self._rendezvous.link is not None, "the nodes have met"
        return self._rendezvous.link

    def _report(self, event: protocol.Event) -> None:
        with self._sending, contextlib.suppress(OSError):  # the agent is gone; serve() is about to notice
            self._channel.send(event)


def _move_stderr() -> None:
    """Redirects torch's messages about hosts without a name and closed connections to a file."""
    directory = os.environ.get("PHALANX_RUN_DIR")
    if directory is not None:
        with contextlib.suppress(OSError):
            log = run_files.open_file(Path(directory) / KEEPER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            os.close(log)
