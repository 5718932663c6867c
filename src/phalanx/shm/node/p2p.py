"""send and recv between ranks of a node, over Unix sockets.

A sender connects to the receiver's socket, which exists since the group was made, so no rank waits for another before
there is a message. A message is read when a rank wants it, or when it comes before one that is wanted; all others stay
with their senders. One thread moves all messages, from the first one on.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from phalanx.errors import CollectiveError, UsageError
from phalanx.shm.node.failures import CollectiveAborted, CollectiveMismatch, Names, PeerLost
from phalanx.shm.node.p2p_message import Message, spell
from phalanx.shm.node.status_log import StatusLog
from phalanx.shm.node.tensors import width_of

_HEADER = struct.Struct("<qQQ")
"""The tag, the type and the number of elements."""
_CREDENTIALS = struct.Struct("3i")
_PIECE = 1 << 20
"""Bytes that are sent at a time. A timeout counts from the last piece."""


def _peer_pid(connection: socket.socket) -> int | None:
    """Returns the pid at the other end, as the kernel knows it; None for a process of another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid if uid == os.geteuid() else None


class Messages:
    """The messages of one rank in one group."""

    def __init__(self, rank: int, names: Names, status_log: StatusLog) -> None:
        self._rank, self._names, self._status_log = rank, names, status_log
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind("")  # the kernel chooses an abstract name: it leaves no file
        self._listener.listen(len(names.ranks))
        self.address = self._listener.getsockname()[1:].decode()
        self.closed: str | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        # From here on, only the thread uses it.
        self._pidfds: dict[int, int] = {}
        self._ended: set[int] = set()
        self._outgoing: dict[int, socket.socket] = {}
        self._incoming: dict[int, socket.socket] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._senders: set[asyncio.Task[None]] = set()
        self._open: set[Message] = set()
        self._wanted: list[Message] = []
        self._unclaimed: list[tuple[int, int, int, bytearray]] = []
        """Messages that came before a wanted one: source, tag, type, bytes."""

    def connect(self, addresses: Sequence[str], pidfds: Sequence[int]) -> None:
        """Takes the other ranks' sockets, and the descriptors that show when their processes end."""
        self._addresses, self._given_pidfds = addresses, pidfds

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        return self._post(Message(tensor, peer, tag, False, self._names, self._status_log))

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> Message:
        return self._post(Message(tensor, peer, tag, True, self._names, self._status_log))

    def _post(self, message: Message) -> Message:
        if self.closed:
            raise UsageError(self.closed)
        if message.peer == self._rank:
            raise UsageError(f"{self._names(self._rank)} cannot send to itself or receive from itself.")
        with self._starting:
            if self._thread is None:
                self._start()
        self._loop.call_soon_threadsafe(self._receive if message.received else self._send, message)
        return message

    def close(self, reason: str) -> None:
        """Ends the thread. Messages that a rank still waits for raise."""
        self.closed = reason
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._listener.close()

    # ---- the thread

    def _start(self) -> None:
        self._pidfds = {rank: os.dup(fd) for rank, fd in enumerate(self._given_pidfds) if fd >= 0}
        has_begun = threading.Event()
        name = f"phalanx-messages-{self._names.group}"
        self._thread = threading.Thread(target=self._run, args=(has_begun,), name=name, daemon=True)
        self._thread.start()
        has_begun.wait()

    def _run(self, has_begun: threading.Event) -> None:
        # Made here, where no KeyboardInterrupt is raised: a loop that is half made warns when it is freed.
        self._loop = asyncio.new_event_loop()
        has_begun.set()
        self._loop.add_reader(self._listener, self._accept)
        for rank, fd in self._pidfds.items():
            self._loop.add_reader(fd, self._peer_ended, rank)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        self._loop.close()
        for connection in (*self._incoming.values(), *self._outgoing.values()):
            connection.close()
        for fd in self._pidfds.values():
            os.close(fd)
        for message in tuple(self._open):
            self._fail(message, CollectiveAborted(f"the group was left while {message}."))

    def _finish(self, message: Message, peer: int) -> None:
        self._open.discard(message)
        message.finish(peer)

    def _fail(self, message: Message, error: Exception) -> None:
        self._open.discard(message)
        message.end(error)

    # ---- sending

    def _send(self, message: Message) -> None:
        self._open.add(message)
        task = self._loop.create_task(self._deliver(message))
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)

    async def _deliver(self, message: Message) -> None:
        peer = message.peer
        assert peer is not None, "a message that is sent has a receiver"
        try:
            async with self._locks.setdefault(peer, asyncio.Lock()):
                connection = self._outgoing.get(peer) or self._connect(peer)
                await self._loop.sock_sendall(connection, _HEADER.pack(message.tag, message.code, message.count))
                for start in range(0, len(message.bytes), _PIECE):
                    await self._loop.sock_sendall(connection, message.bytes[start : start + _PIECE])
                    message.moved = time.monotonic()
        except OSError as error:
            if peer in self._outgoing:  # it may have broken off within a message, or was never connected
                self._outgoing.pop(peer).close()
            self._fail(message, self._reason(error, peer, message))
        else:
            self._finish(message, peer)

    def _connect(self, peer: int) -> socket.socket:
        if peer in self._ended:  # a process that it forked may hold its listener open
            raise ConnectionResetError
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._outgoing[peer] = connection
        connection.connect("\0" + self._addresses[peer])  # returns at once: the queue has room for every rank
        if _peer_pid(connection) != self._names.pids[peer]:  # the address comes from the store
            connection.close()
            raise ConnectionRefusedError
        return connection

    # ---- receiving

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            pid = _peer_pid(connection)
            if pid is None or pid not in self._names.pids:  # any process of the machine can connect
                connection.close()
                continue
            source = self._names.pids.index(pid)
            self._incoming[source] = connection
            self._read_if_wanted(source)

    def _receive(self, message: Message) -> None:
        self._open.add(message)
        for place, (source, tag, code, data) in enumerate(self._unclaimed):
            if tag == message.tag and message.peer in (None, source):
                del self._unclaimed[place]
                self._deliver_read(message, source, code, data)
                return
        self._wanted.append(message)
        for source in self._pidfds if message.peer is None else (message.peer,):
            self._read_if_wanted(source)

    def _read_if_wanted(self, source: int) -> None:
        if not self._is_wanted(source) or source in self._readers:
            return
        if source in self._incoming:
            self._readers[source] = self._loop.create_task(self._read(source, self._incoming[source]))
        elif source in self._ended:
            self._fail_wanted(source)

    def _is_wanted(self, source: int) -> bool:
        return any(message.peer in (None, source) for message in self._wanted)

    async def _read(self, source: int, connection: socket.socket) -> None:
        try:
            while self._is_wanted(source):
                await self._read_one(source, connection)
        except OSError as error:
            self._incoming.pop(source).close()
            if isinstance(error, ConnectionError):
                self._ended.add(source)
            self._fail_wanted(source, error)
        finally:
            self._readers.pop(source, None)

    async def _read_one(self, source: int, connection: socket.socket) -> None:
        header = bytearray(_HEADER.size)
        await self._fill(connection, memoryview(header))
        tag, code, count = _HEADER.unpack(header)
        message = self._take_wanted(source, tag)
        if message is not None and (message.code, message.count) == (code, count):
            try:
                await self._fill(connection, message.bytes, message)
            except OSError as error:
                self._fail(message, self._reason(error, source, message))
                raise
            self._finish(message, source)
            return
        if message is not None:
            self._wanted.insert(0, message)  # it waits until all of the message that does not fit is read
        data = bytearray(count * width_of(code))
        await self._fill(connection, memoryview(data))
        message = self._take_wanted(source, tag)  # a rank may have asked for it meanwhile
        if message is None:
            self._unclaimed.append((source, tag, code, data))
        else:
            self._deliver_read(message, source, code, data)

    async def _fill(self, connection: socket.socket, into: memoryview, message: Message | None = None) -> None:
        while into:
            got = await self._loop.sock_recv_into(connection, into)
            if got == 0:
                raise ConnectionResetError
            into = into[got:]
            if message is not None:
                message.moved = time.monotonic()

    def _take_wanted(self, source: int, tag: int) -> Message | None:
        for place, message in enumerate(self._wanted):
            if message.tag == tag and message.peer in (None, source):
                return self._wanted.pop(place)
        return None

    def _deliver_read(self, message: Message, source: int, code: int, data: bytearray) -> None:
        """Gives a message the bytes that were read before a rank wanted them."""
        count = len(data) // width_of(code)
        if (message.code, message.count) == (code, count):
            message.bytes[:] = data
            self._finish(message, source)
            return
        sent, asked = spell(code, count), spell(message.code, message.count)
        self._fail(
            message,
            CollectiveMismatch(
                f"{self._names(source)} sent {sent} where {asked} is to be received; "
                f"tag {message.tag} of group '{self._names.group}'."
            ),
        )

    # ---- peers that end

    def _peer_ended(self, rank: int) -> None:
        self._loop.remove_reader(self._pidfds[rank])
        self._ended.add(rank)
        self._accept()  # its connection may still be waiting, with a message
        # A process that it forked may hold its sockets open. What it has sent can still be read.
        if rank in self._incoming:
            self._incoming[rank].shutdown(socket.SHUT_RD)
        else:
            self._fail_wanted(rank)
        if rank in self._outgoing:
            self._outgoing[rank].shutdown(socket.SHUT_WR)

    def _fail_wanted(self, source: int, error: OSError | None = None) -> None:
        """Fails the messages that can only come from there."""
        nobody_left = not self._pidfds.keys() - (self._ended - self._incoming.keys())
        for message in [m for m in self._wanted if m.peer == source or (m.peer is None and nobody_left)]:
            self._wanted.remove(message)
            self._fail(message, self._reason(error, source, message))

    def _reason(self, error: OSError | None, peer: int, message: Message) -> Exception:
        if error is not None and not isinstance(error, ConnectionError):  # an error of this process
            return CollectiveError(f"{message}: {error.strerror}.")
        return PeerLost(f"{self._names(peer)} (pid {self._names.pids[peer]}) has ended or left: {message}.")
