"""The connections between the leaders of the nodes, for signatures, small blocks and failures.

gloo's waits cannot be interrupted, do not name the missing rank, and go wrong if two sides disagree on a size. So the
leaders exchange signatures here before gloo moves a large block; small blocks are sent along. The end of a
connection names the rank that is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx import messages
from phalanx.errors import ForeignData, JoinError
from phalanx.messages import Name, Port
from phalanx.shm.hierarchical.topology import Topology
from phalanx.shm.node import failures
from phalanx.shm.node.failures import Names
from phalanx.store.failure_flag import Failure
from phalanx.store.primitives import read, wait_for, write

if TYPE_CHECKING:
    from torch.distributed import Store

_HEADER = struct.Struct("<BI")
"""The kind of a frame, and the number of bytes that follow."""
_PAYLOAD, _FAILURE, _LEAVING = range(3)
_HELLO = struct.Struct("<16sI")
"""A secret that only ranks of the group can read in the store, and the caller's node."""
_SECRET = re.compile("[0-9a-f]{32}")
_READ_BYTES = 1 << 18
_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2, socket.TCP_USER_TIMEOUT: 15_000}
"""A lost host is noticed after 15 s (the last value is in milliseconds): later than by the agents of `phalanx run`,
whose report explains more."""
SLICE = 0.1
"""Seconds after which a wait looks for failures."""


class _Connection:
    """The connection to another leader."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.payloads: deque[bytearray] = deque()
        self.failure: Exception | None = None
        self.broken: str | None = None
        """The reason for which the network has closed it."""
        self.has_left = self.has_ended = False
        self._out = bytearray()
        self._in = bytearray()

    @property
    def is_sending(self) -> bool:
        return bool(self._out) and not self.has_ended

    def post(self, kind: int, data: bytes | bytearray) -> None:
        self._out += _HEADER.pack(kind, len(data)) + data
        self.send()

    def send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while self._out:
                    del self._out[: self.socket.send(self._out)]
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    raise
                self._out.clear()  # the end is seen by reading, after the last frames

    def receive(self) -> None:
        while not self.has_ended:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            except OSError as error:
                data, self.broken = b"", error.strerror
            self.has_ended = not data
            self._in += data
        self._split_frames()

    def _split_frames(self) -> None:
        while len(self._in) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._in)
            end = _HEADER.size + length
            if len(self._in) < end:
                return
            data = self._in[_HEADER.size : end]
            del self._in[:end]
            if kind == _PAYLOAD:
                self.payloads.append(data)
            elif kind == _LEAVING:
                self.has_left = True
            elif self.failure is None:
                found = messages.decode(data, Failure, "another leader")
                self.failure = failures.by_name(found.kind, found.text)


class LeaderLinks:
    """A leader's connections to all other leaders."""

    def __init__(self, store: Store, nodes: Topology, address: str, timeout: float, names: Names) -> None:
        self._nodes, self._names = nodes, names
        self._selector = selectors.DefaultSelector()
        found = _connect_all(store, nodes, address, timeout)
        self._connections = {node: _Connection(nodes.leader_of(node), found[node]) for node in sorted(found)}
        for peer in self._connections.values():
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def exchange(self, payload: bytes | bytearray, seconds: float, look: Callable[[], None]) -> list[bytes | bytearray]:
        """Exchanges a payload with all leaders. Returns those of all nodes; ``look`` may raise meanwhile."""
        for peer in self._connections.values():
            peer.post(_PAYLOAD, payload)
        deadline = time.monotonic() + seconds
        while any(not peer.payloads or peer.is_sending for peer in self._connections.values()):
            self._check_awaited()
            if not self._move(SLICE):
                look()
            if time.monotonic() > deadline:
                late = [self._nodes.ranks[node] for node, peer in self._connections.items() if not peer.payloads]
                missing = list(itertools.chain(*late))
                raise failures.timed_out(self._names, self._nodes.rank, missing, self._names.timeout)
        self.look()  # a leader may have failed since
        payloads = {node: peer.payloads.popleft() for node, peer in self._connections.items()}
        return [payloads.get(node, payload) for node in range(self._nodes.count)]

    def look(self) -> None:
        """Raises the failure that another leader has sent, or the loss of its host."""
        self._move(0.0)
        self._raise_failure()

    def _raise_failure(self) -> None:
        for peer in self._connections.values():
            if peer.failure is not None:
                raise peer.failure
            if peer.broken is not None:
                raise failures.unreachable(self._names, peer.rank, peer.broken)

    def ended(self) -> list[int]:
        """Returns the leaders whose connections have ended."""
        self._move(0.0)
        return [peer.rank for peer in self._connections.values() if peer.has_ended]

    def send_failure(self, cause: Exception) -> None:
        for peer in self._connections.values():
            peer.post(_FAILURE, messages.encode(Failure.of(cause)))

    def close(self) -> None:
        self._move(0.0)  # a connection that is closed with unread data drops its last frames
        for peer in self._connections.values():
            peer.post(_LEAVING, b"")
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)
        self.drop()

    def drop(self) -> None:
        """Closes the descriptors without a notice to the peers: a forked child has only copies."""
        self._selector.close()
        for peer in self._connections.values():
            peer.socket.close()

    def _check_awaited(self) -> None:
        """Raises if an awaited payload cannot come any more."""
        self._raise_failure()
        for peer in self._connections.values():
            if not peer.payloads and peer.has_left:
                raise failures.left(self._names, peer.rank)
            if not peer.payloads and peer.has_ended:
                raise failures.lost(self._names, peer.rank)

    def _move(self, seconds: float) -> bool:
        """Sends and receives for up to ``seconds``. Returns whether there was anything."""
        for peer in self._connections.values():
            if not peer.has_ended:
                both = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.is_sending else 0)
                if self._selector.get_key(peer.socket).events != both:
                    self._selector.modify(peer.socket, both, peer)
        ready = self._selector.select(seconds)
        for key, events in ready:
            peer: _Connection = key.data
            if events & selectors.EVENT_WRITE:
                peer.send()
            if events & selectors.EVENT_READ:
                peer.receive()
            if peer.has_ended:
                self._selector.unregister(peer.socket)
        return bool(ready)


# ---- connecting


def _connect_all(store: Store, nodes: Topology, address: str, timeout: float) -> dict[int, socket.socket]:
    """Connects to all other leaders. The later node connects to the earlier one."""
    deadline = time.monotonic() + timeout
    secret = secrets.token_bytes(16)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as on_error, socket.create_server((address, 0), family=family) as listener:
        write(store, f"leader/{nodes.own_node}", (address, listener.getsockname()[1], secret.hex()))
        for node in range(nodes.own_node):
            found[node] = _call(store, node, nodes.own_node, deadline)
            on_error.callback(found[node].close)
        while len(found) < nodes.count - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [node for node in range(nodes.count) if node not in found and node != nodes.own_node]
                raise JoinError(
                    f"node {nodes.own_node} waited {timeout:g} s for the leaders of nodes {missing}."
                ) from None
            on_error.callback(connection.close)
            caller = _identify(connection, secret)
            if caller is not None and nodes.own_node < caller < nodes.count and caller not in found:
                found[caller] = connection
        on_error.pop_all()
    return found


def _call(store: Store, node: int, caller: int, deadline: float) -> socket.socket:
    if not wait_for(store, f"leader/{node}", deadline - time.monotonic()):
        raise JoinError(f"the leader of node {node} did not come while the group was being formed.")
    address, port, secret = read(store, f"leader/{node}", tuple[Name, Port, Name])
    if not _SECRET.fullmatch(secret):
        raise ForeignData(f"the store holds a secret of node {node} that phalanx did not write there.")
    try:
        connection = socket.create_connection((address, port), timeout=max(0.01, deadline - time.monotonic()))
        connection.sendall(_HELLO.pack(bytes.fromhex(secret), caller))
    except OSError as error:
        raise JoinError(
            f"node {caller} cannot reach node {node} at {address} port {port} ({error}); "
            "set GLOO_SOCKET_IFNAME to the network to use."
        ) from None
    return connection


def _identify(connection: socket.socket, secret: bytes) -> int | None:
    """Returns the node that connects; None for a process that is not of the group."""
    connection.settimeout(5.0)
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < _HELLO.size:
            data = connection.recv(_HELLO.size - len(received))
            if not data:
                break
            received += data
    if len(received) == _HELLO.size and secrets.compare_digest(received[:16], secret):
        return _HELLO.unpack(received)[1]
    connection.close()
    return None
