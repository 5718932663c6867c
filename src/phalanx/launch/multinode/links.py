"""Sealed connections between the keepers of all nodes, and the thread that runs them on one node.

The store is open to everybody who reaches its port, so it only holds the hub's address. All other messages between
nodes use these connections. Each begins with a nonce of both sides, and every message is sealed for this connection,
direction and position: without the run's secret, messages can be neither forged nor replayed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

from phalanx import messages
from phalanx.errors import ForeignData
from phalanx.launch.multinode import protocol
from phalanx.launch.multinode.protocol import LinkMessage

SILENCE = 10.0
"""Seconds without a heartbeat after which a node counts as lost. A shorter interruption does no harm."""
BEAT = 1.0
_SUSPENDED = 3 * BEAT
"""Seconds between two turns of the loop after which it was this process that stood still, not the others."""
_LARGEST_HELLO = 1 << 16
_GREETING = b"phalanx link 1\n"
_NONCE_BYTES = 16
_SIZE = struct.Struct("!I")


class ServerLost(NamedTuple):
    """The connection to the serving node is lost."""

    text: str


Receiver = Callable[[LinkMessage | protocol.Ignored | ServerLost], None]
"""Gets what arrives on the connections, on their thread."""


class Connection:
    """One end of a sealed connection; it never blocks."""

    def __init__(self, sock: socket.socket, *, is_hub: bool) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._is_hub = sock, is_hub
        self.address: str = sock.getpeername()[0]
        self.is_known = False
        """It has sent a message with a valid seal."""
        self.node: int | None = None
        """Its number in the round."""
        self.last_message_at = time.monotonic()
        self._nonce = os.urandom(_NONCE_BYTES)
        self._session: str | None = None
        self._out, self._in = bytearray(_GREETING + self._nonce), bytearray()
        self._unsealed: list[bytes] = []
        self._sent = self._received = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: LinkMessage) -> None:
        self._unsealed.append(messages.encode(message))
        self._seal_waiting()

    def _seal_waiting(self) -> None:
        if self._session is not None:
            for payload in self._unsealed:
                data = messages.seal(self._key(self._is_hub), self._sent, payload)
                self._out += _SIZE.pack(len(data)) + data
                self._sent += 1
            self._unsealed.clear()

    def _key(self, from_hub: bool) -> str:
        return f"link/{self._session}/{'down' if from_hub else 'up'}"

    def flush(self) -> None:
        """Sends what the socket takes now."""
        with contextlib.suppress(BlockingIOError):
            while self._out:
                del self._out[: self._socket.send(self._out)]

    @property
    def has_sent_all(self) -> bool:
        return not self._out and not self._unsealed

    def receive(self) -> Iterator[LinkMessage]:
        """Yields the messages that have arrived. Raises OSError at the end, ForeignData for another sender's data."""
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        self._in += data
        if self._session is None and not self._greet():
            return
        most = messages.MOST_BYTES if self.is_known else _LARGEST_HELLO
        while len(self._in) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._in)
            if size > most:
                raise ForeignData(f"{self.address} sends {size} bytes, where {most} are the most.")
            if len(self._in) < _SIZE.size + size:
                return
            sealed = bytes(self._in[_SIZE.size : _SIZE.size + size])
            del self._in[: _SIZE.size + size]
            yield self._open(sealed)

    def _greet(self) -> bool:
        """Returns True once the other nonce is there; both together identify this connection."""
        length = len(_GREETING) + _NONCE_BYTES
        if not _GREETING.startswith(self._in[: len(_GREETING)]):
            raise ForeignData(f"{self.address} is no node of a run.")
        if len(self._in) < length:
            return False
        theirs = bytes(self._in[len(_GREETING) : length])
        del self._in[:length]
        nonces = (self._nonce, theirs) if self._is_hub else (theirs, self._nonce)
        self._session = "".join(nonce.hex() for nonce in nonces)
        self._seal_waiting()
        return True

    def _open(self, sealed: bytes) -> LinkMessage:
        payload = messages.open_sealed(self._key(not self._is_hub), self._received, sealed, f"node {self.address}")
        self._received += 1
        self.is_known, self.last_message_at = True, time.monotonic()
        return messages.decode(payload, LinkMessage, f"node {self.address}")


class LinkThread:
    """The thread that runs a node's connections. Other threads give it functions to call."""

    def __init__(self, receiver: Receiver) -> None:
        self._deliver = receiver
        self._selector = selectors.DefaultSelector()
        self._connections: list[Connection] = []
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._run_calls)
        self._leave_by: float | None = None
        self._beat_at = self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="node-links", daemon=True)

    def leave(self, exit_code: int | None, seconds: float) -> None:
        """Ends the thread once the other nodes know, or after ``seconds``."""
        self._call(lambda: self._begin_leaving(exit_code, time.monotonic() + seconds))
        self._thread.join(seconds + BEAT)

    def _begin_leaving(self, exit_code: int | None, deadline: float) -> None:
        raise NotImplementedError

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.put(function)
        with contextlib.suppress(OSError):  # its buffer is full of wake-ups, or it has ended
            self._wake.send(b"\0")

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 12)
        while not self._calls.empty():
            self._calls.get()()

    def _run(self) -> None:
        try:
            while not self._may_end():
                for key, _ in self._selector.select(BEAT / 4):
                    key.data()
                self._turn(time.monotonic())
        finally:
            for connection in self._connections:
                connection.close()
            self._selector.close()
            self._woken.close()
            self._wake.close()

    def _may_end(self) -> bool:
        return self._leave_by is not None and (time.monotonic() >= self._leave_by or not self._connections)

    def _turn(self, now: float) -> None:
        if now - self._turned_at > _SUSPENDED:
            for connection in self._connections:
                connection.last_message_at = now
        self._turned_at = now
        if now >= self._beat_at:
            self._beat_at = now + BEAT
            for connection in self._connections:
                connection.send(protocol.Beat())
        for connection in list(self._connections):
            self._flush(connection)
            if now - connection.last_message_at > SILENCE:
                self._drop(connection, f"there has been no sign of life for {SILENCE:g} s")

    def _add(self, connection: Connection) -> None:
        self._connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(connection))

    def _flush(self, connection: Connection) -> None:
        try:
            connection.flush()
            mask = selectors.EVENT_READ | (0 if connection.has_sent_all else selectors.EVENT_WRITE)
            self._selector.modify(connection, mask, lambda: self._receive(connection))
        except OSError as error:
            self._drop(connection, f"its connection has ended ({error.strerror})")

    def _receive(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._handle(connection, message)
        except OSError:
            self._drop(connection, "its connection has ended")
        except ForeignData as error:
            self._deliver(protocol.Ignored(f"a message from {connection.address} is ignored: {error}"))
            self._drop(connection, "its messages are not sealed as this run's", is_foreign=True)

    def _drop(self, connection: Connection, text: str, *, is_foreign: bool = False) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()
            self._has_lost(connection, text, is_foreign)

    def _handle(self, connection: Connection, message: LinkMessage) -> None:
        raise NotImplementedError

    def _has_lost(self, connection: Connection, text: str, is_foreign: bool) -> None:
        raise NotImplementedError
