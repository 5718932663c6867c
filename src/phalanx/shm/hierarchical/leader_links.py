"""The leaders' own connections: one rank of each node with one of each other, for everything that is short.

gloo cannot be told to stop waiting, does not say who is missing, and goes wrong when two sides disagree on a size. So
before anything large moves by gloo, the leaders have said here what their nodes are about to do; small messages come
along at once. The end of a connection names the rank that is gone.
"""

from __future__ import annotations

import contextlib
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
"""What it is, and the number of bytes that follow."""
_WORD, _FAILURE, _FAREWELL = range(3)
_HELLO = struct.Struct("<16sI")
"""A secret that only ranks of the group can read in the store, and the caller's node."""
_SECRET = re.compile("[0-9a-f]{32}")
_READ_BYTES = 1 << 18
_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2, socket.TCP_USER_TIMEOUT: 15_000}
"""A host that is gone without a word is noticed after 15 s (the last is in milliseconds): later than by the agents of
`phalanx run`, which can say more about it and shall have the first word."""
SLICE = 0.1
"""Seconds after which a wait looks around."""


class _Connection:
    """The connection to one other leader."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer, self.socket = peer, connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.words: deque[bytearray] = deque()
        self.failure: Exception | None = None
        self.broken: str | None = None
        """Why the network has given it up."""
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
                self._out.clear()  # its end is seen by reading, after its last words

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
        self._sort()

    def _sort(self) -> None:
        while len(self._in) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._in)
            end = _HEADER.size + length
            if len(self._in) < end:
                return
            data = self._in[_HEADER.size : end]
            del self._in[:end]
            if kind == _WORD:
                self.words.append(data)
            elif kind == _FAREWELL:
                self.has_left = True
            elif self.failure is None:
                found = messages.decode(data, Failure, "another leader")
                self.failure = failures.by_name(found.kind, found.text)


class LeaderLinks:
    """What the leader of a node has: a line to each other leader."""

    def __init__(self, store: Store, nodes: Topology, address: str, timeout: float, names: Names) -> None:
        self._nodes, self._names = nodes, names
        self._selector = selectors.DefaultSelector()
        connections = _connect_all(store, nodes, address, timeout)
        self._lines = {node: _Connection(nodes.leader_of(node), connections[node]) for node in sorted(connections)}
        for line in self._lines.values():
            self._selector.register(line.socket, selectors.EVENT_READ, line)

    def exchange(self, word: bytes | bytearray, seconds: float, look: Callable[[], None]) -> list[bytes | bytearray]:
        """What every node's leader says, in the order of nodes; ``look`` is called now and then, and may raise."""
        for line in self._lines.values():
            line.post(_WORD, word)
        deadline = time.monotonic() + seconds
        while any(not line.words or line.is_sending for line in self._lines.values()):
            self._complain()
            if not self._move(SLICE):
                look()
            if time.monotonic() > deadline:
                missing = [rank for node, line in self._lines.items() if not line.words for rank in self._ranks(node)]
                raise failures.timed_out(self._names, self._nodes.rank, missing, self._names.timeout)
        self.look()  # whoever said it may have given up since
        words = {node: line.words.popleft() for node, line in self._lines.items()}
        return [words.get(node, word) for node in range(self._nodes.count)]

    def look(self) -> None:
        """Raises what another leader has made known, or the loss of its host."""
        self._move(0.0)
        self._raise_what_is_known()

    def _raise_what_is_known(self) -> None:
        for line in self._lines.values():
            if line.failure is not None:
                raise line.failure
            if line.broken is not None:
                raise failures.unreachable(self._names, line.peer, line.broken)

    def ended(self) -> list[int]:
        """The leaders whose connections have ended."""
        self._move(0.0)
        return [line.peer for line in self._lines.values() if line.has_ended]

    def tell(self, cause: Exception) -> None:
        for line in self._lines.values():
            line.post(_FAILURE, messages.encode(Failure.of(cause)))

    def close(self) -> None:
        self._move(0.0)  # what is unread when a connection is closed takes the last words with it
        for line in self._lines.values():
            line.post(_FAREWELL, b"")
            with contextlib.suppress(OSError):
                line.socket.shutdown(socket.SHUT_WR)
        self.drop()

    def drop(self) -> None:
        """Closes the descriptors and says nothing: for a forked child, whose copies they are."""
        self._selector.close()
        for line in self._lines.values():
            line.socket.close()

    def _ranks(self, node: int) -> tuple[int, ...]:
        return self._nodes.members[node]

    def _complain(self) -> None:
        """Raises if something is known that makes waiting useless."""
        self._raise_what_is_known()
        for line in self._lines.values():
            if not line.words and line.has_left:
                raise failures.left(self._names, line.peer)
            if not line.words and line.has_ended:
                raise failures.lost(self._names, line.peer)

    def _move(self, seconds: float) -> bool:
        """Sends and receives what can be; whether there was anything."""
        for line in self._lines.values():
            if not line.has_ended:
                both = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.is_sending else 0)
                if self._selector.get_key(line.socket).events != both:
                    self._selector.modify(line.socket, both, line)
        ready = self._selector.select(seconds)
        for key, events in ready:
            line: _Connection = key.data
            if events & selectors.EVENT_WRITE:
                line.send()
            if events & selectors.EVENT_READ:
                line.receive()
            if line.has_ended:
                self._selector.unregister(line.socket)
        return bool(ready)


# ---- connecting


def _connect_all(store: Store, nodes: Topology, address: str, timeout: float) -> dict[int, socket.socket]:
    """A connection to each other leader. The later node calls the earlier one."""
    deadline = time.monotonic() + timeout
    secret = secrets.token_bytes(16)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as on_error, socket.create_server((address, 0), family=family) as listener:
        write(store, f"leader/{nodes.here}", (address, listener.getsockname()[1], secret.hex()))
        for node in range(nodes.here):
            found[node] = _call(store, node, nodes.here, deadline)
            on_error.callback(found[node].close)
        while len(found) < nodes.count - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [node for node in range(nodes.count) if node not in found and node != nodes.here]
                raise JoinError(f"node {nodes.here} waited {timeout:g} s for the leaders of nodes {missing}.") from None
            on_error.callback(connection.close)
            caller = _identify(connection, secret)
            if caller is not None and nodes.here < caller < nodes.count and caller not in found:
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
    """The node that calls; None for whoever else found the port."""
    connection.settimeout(5.0)
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < _HELLO.size:
            data = connection.recv(_HELLO.size - len(said))
            if not data:
                break
            said += data
    if len(said) == _HELLO.size and secrets.compare_digest(said[:16], secret):
        return _HELLO.unpack(said)[1]
    connection.close()
    return None
