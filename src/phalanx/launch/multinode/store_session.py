"""The keeper's part in a run of several nodes: it meets the others for its agent, and passes on what they say.

A store behind a cut link answers after many minutes, or never. So the thread that listens to the agent never asks it
anything: another one carries out the agent's orders, and the links have a thread of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from msgspec.structs import replace

from phalanx import run_files
from phalanx.errors import JoinError, PhalanxError
from phalanx.events import KEEPER_LOG, Ending
from phalanx.fd_channel import Channel
from phalanx.launch.multinode import RunOver, protocol, rendezvous
from phalanx.launch.multinode.elastic import ElasticRendezvous
from phalanx.launch.multinode.hub import Hub
from phalanx.launch.multinode.links import SILENCE, Cut, Spoke
from phalanx.launch.multinode.protocol import LinkMessage, NodeInfo, NodesMissing, Order, Terms
from phalanx.store import tcp_store

if TYPE_CHECKING:
    from torch.distributed import Store

_LEAVE_SECONDS = 5.0
_REFUSAL_STAYS = 1.0
_MOST_IGNORED = 20
"""Lines about messages from outside the run; then there are enough."""


@dataclass
class _Attempt:
    """What the nodes have told each other about it, perhaps before this one has begun it."""

    master: protocol.MasterAt | None = None
    stop: protocol.Stop | None = None
    """Of another node, or of this one."""
    endings: dict[int, tuple[Ending, ...]] = field(default_factory=dict)
    is_settled: bool = False


class StoreSession:
    """The session of one node. Everything it hears goes to the agent as an event."""

    def __init__(self, channel: Channel, listener: socket.socket | None) -> None:
        """``listener``: this node serves the store, behind it."""
        self._channel, self._listener = channel, listener
        self._sending = threading.Lock()
        self._store: Store | None = None
        self._hosted: Store | None = None
        self._rendezvous = rendezvous.Rendezvous(self._hear)
        self._elastic: ElasticRendezvous | None = None
        self._own = -1
        self._lock = threading.RLock()
        """Guards what follows, which the links' thread changes."""
        self._nodes: tuple[NodeInfo, ...] = ()
        self._lost: set[int] = set()
        self._attempts: defaultdict[int, _Attempt] = defaultdict(_Attempt)
        self._current = -1
        self._ignored: set[str] = set()
        self._outcome: SimpleQueue[int] = SimpleQueue()
        """The exit code of a run that has ended without this node."""
        self._workers: tuple[socket.socket, Store] | None = None
        """The socket of the workers' store and the store, on the first node."""
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._is_complete = threading.Event()
        """No other node can come any more."""
        self._is_over = threading.Event()
        self._has_finished = threading.Event()

    def serve(self) -> None:
        """Until the agent leaves, or dies, which the other nodes are told."""
        _move_stderr()
        threading.Thread(target=self._run_orders, name="store-session", daemon=True).start()
        order: Order | None = None
        while not isinstance(order, protocol.Leave):
            order = protocol.receive_order(self._channel)
            self._orders.put(order)
        self._rendezvous.is_leaving.set()
        # If the store has stopped answering, this is not the place to wait for it, nor without other nodes.
        self._has_finished.wait(_LEAVE_SECONDS + 1.0 if self._nodes else 1.0)
        self._is_over.set()
        self._is_complete.set()
        self._tell(protocol.Goodbye())

    def _run_orders(self) -> None:
        order: Order | None = None
        while not isinstance(order, protocol.Leave):
            order = self._orders.get()
            try:
                self._execute(order)
            except PhalanxError as error:
                if self._hosted is not None:  # a moment, so that the others hear it too
                    self._is_over.wait(_REFUSAL_STAYS)
                self._tell(protocol.Refused(str(error)))
            except RunOver as over:
                self._tell(protocol.Over(over.exit_code))
            except OSError as error:  # there is no port or descriptor left
                self._tell(protocol.Refused(f"this node cannot listen for the others: {error.strerror}."))
            except RuntimeError as error:
                self._lose_server(f"its store does not answer ({str(error).splitlines()[0]})")
        self._has_finished.set()

    def _execute(self, order: Order) -> None:
        match order:
            case protocol.Meet():
                self._meet(order)
            case protocol.BeginAttempt(number):
                self._begin(number)
            case protocol.Stop() | protocol.Endings() | protocol.Published():
                self._post(order)
            case protocol.Leave(exit_code):
                self._leave(exit_code)

    # ---- the agent's orders

    def _meet(self, order: protocol.Meet) -> None:
        info, terms = replace(order.info, serves=self._listener is not None), order.terms
        if order.elastic:
            info = replace(info, node=-1)
        if self._store is None:
            self._open(order, info)
        if order.elastic:
            self._gather(info, terms)
        else:
            self._own = info.node
            self._rendezvous.sign_in("run", info, terms.timeout, self._tell_waiting)
            self._is_complete.set()
        self._tell(protocol.Joined(self._own, self._nodes))

    def _open(self, order: protocol.Meet, info: NodeInfo) -> None:
        timeout = order.terms.timeout
        if self._listener is not None:
            self._hosted = tcp_store.serve(order.host, self._listener, timeout=60.0)
            address = self._listener.getsockname()[0]
            hub = Hub(_listen(address), info, order.elastic, self._rendezvous.hear)
            self._rendezvous.serve(hub)
            advertising = self._hosted, address, hub.port, self._is_complete
            threading.Thread(target=rendezvous.advertise, args=advertising, name="hub-address", daemon=True).start()
        store = tcp_store.connect(order.host, order.port, timeout, self._notice)
        if self._listener is None:
            self._rendezvous.connect(store, order.host, info, timeout, self._notice)
        self._store = store

    def _gather(self, info: NodeInfo, terms: Terms) -> None:
        """Rounds are made until all who were counted have signed in as well; one may have died in between."""
        if self._elastic is None:
            assert self._store is not None
            self._elastic = ElasticRendezvous(self._store, info, terms, self._tell_waiting, self._outcome)
        while True:
            try:
                name, self._own, nodes = self._elastic.next_round()
            except JoinError as error:
                raise JoinError(f"{error}{self._link.secret_hint()}") from None
            own = replace(info, node=self._own, nnodes=nodes)
            with contextlib.suppress(NodesMissing):
                self._rendezvous.sign_in(name, own, SILENCE + _LEAVE_SECONDS, lambda count, waited: None)
                return

    def _tell_waiting(self, count: int, waited: int, under_way: bool = False) -> None:
        self._tell(protocol.Waiting(count, waited, under_way))

    def _begin(self, number: int) -> None:
        if self._own == 0:
            self._open_master(number, self._nodes[0].address)
        with self._lock:
            for over in [each for each in self._attempts if each < number]:
                del self._attempts[over]
            self._current, attempt = number, self._attempts[number]
            for known in (attempt.master, attempt.stop):
                if known is not None:
                    self._tell(known)

    def _open_master(self, number: int, address: str) -> None:
        """The workers' store of this attempt, on the first node."""
        if self._workers is not None:
            self._workers[0].close()
        self._workers = None  # its connections close before the next one is there
        listener = _listen(address)
        self._workers = listener, tcp_store.serve(address, listener, timeout=60.0)
        self._attempts[number].master = master = protocol.MasterAt(number, address, listener.getsockname()[1])
        self._link.post(master)

    def _post(self, post: protocol.Stop | protocol.Endings | protocol.Published) -> None:
        with self._lock:
            attempt = self._attempts[post.attempt]
            if isinstance(post, protocol.Stop):
                attempt.stop = attempt.stop or post
            self._link.post(post)
            if isinstance(post, protocol.Endings):
                attempt.endings[self._own] = post.endings
                self._settle(attempt)

    def _leave(self, exit_code: int | None) -> None:
        """Whoever serves the store stays until the others have heard of the end."""
        if self._rendezvous.link is None:
            return
        if exit_code is not None and self._listener is not None and self._elastic is not None:
            self._elastic.close()
        self._link.leave(exit_code, _LEAVE_SECONDS if exit_code is not None else 1.0)

    # ---- what the other nodes say, on the links' thread

    def _hear(self, message: LinkMessage | protocol.Ignored | Cut) -> None:
        match message:
            case protocol.Met(nodes=nodes):
                with self._lock:
                    self._nodes = nodes
                    self._lost.clear()
                    self._attempts.clear()
            case protocol.Relayed(node, post):
                with self._lock:
                    self._hear_post(node, post, message)
            case protocol.NodeLost(node, text):
                self._lose(node, text)
            case Cut(text):
                self._lose_server(text)
            case protocol.Over(exit_code):
                self._outcome.put(exit_code)
            case protocol.Ignored(text) if text not in self._ignored and len(self._ignored) < _MOST_IGNORED:
                self._ignored.add(text)
                self._tell(message)
            case _:
                pass  # it is of no interest now

    def _hear_post(self, node: int, post: protocol.Post, message: protocol.Relayed) -> None:
        attempt = self._attempts[post.attempt]
        match post:
            case protocol.MasterAt() if node == 0:
                attempt.master = post
                self._tell_current(post)
            case protocol.Stop() if attempt.stop is None:
                attempt.stop = post
                self._tell_current(post)
            case protocol.Endings(endings=endings):
                attempt.endings[node] = endings
                self._settle(attempt)
            case protocol.Published():
                self._tell(message)
            case _:
                pass  # not the first reason to stop

    def _tell_current(self, post: protocol.MasterAt | protocol.Stop) -> None:
        if post.attempt == self._current:
            self._tell(post)

    def _settle(self, attempt: _Attempt) -> None:
        """When all nodes that are not lost have said how their ranks ended."""
        known = attempt.endings.keys()
        if self._own in known and len(known | self._lost) >= len(self._nodes) and not attempt.is_settled:
            attempt.is_settled = True
            self._tell(protocol.Settled(tuple(end for _, ends in sorted(attempt.endings.items()) for end in ends)))

    def _lose(self, node: int, text: str) -> None:
        with self._lock:
            if node not in self._lost and not self._is_over.is_set():
                self._lost.add(node)
                self._tell(protocol.NodeLost(node, text))
                for attempt in self._attempts.values():
                    self._settle(attempt)

    def _lose_server(self, text: str) -> None:
        self._lose(next((info.node for info in self._nodes if info.serves), 0), text)

    # ---- to the agent

    @property
    def _link(self) -> Hub | Spoke:
        assert self._rendezvous.link is not None, "the nodes have met"
        return self._rendezvous.link

    def _notice(self, text: str) -> None:
        self._tell(protocol.Notice(text))

    def _tell(self, event: protocol.Event) -> None:
        with self._sending, contextlib.suppress(OSError):  # the agent is gone; serve() is about to notice
            protocol.send(self._channel, event)


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)


def _move_stderr() -> None:
    """torch writes about every host without a name and every connection that ends; that is for a file."""
    directory = os.environ.get("PHALANX_RUN_DIR")
    if directory is not None:
        with contextlib.suppress(OSError):
            log = run_files.open_file(Path(directory) / KEEPER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            os.close(log)
