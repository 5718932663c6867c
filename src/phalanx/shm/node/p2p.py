"""send and recv: messages between two ranks of a group, over Unix sockets, with the receiver's tags sorted out here.

A rank that sends connects to the receiver's socket, which is there from the group's first moment; so nobody waits
for anybody before there is something to say. A message is read when somebody wants it, or when it stands before one
that is wanted: what nobody asks for stays with its sender. One thread moves everything, from the first message on.
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
"""Tag, type, number of elements."""
_CREDENTIALS = struct.Struct("3i")
_PIECE = 1 << 20
"""Bytes that are sent at a time: a timeout counts from the last of them."""


def _process_behind(line: socket.socket) -> int | None:
    """The pid at the other end, as the kernel says; None for a process of another user."""
    pid, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid if uid == os.geteuid() else None


class Messages:
    """The messages of one rank in one group."""

    def __init__(self, rank: int, names: Names, status_log: StatusLog) -> None:
        self._rank, self._names, self._status_log = rank, names, status_log
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind("")  # an abstract name of the kernel's choice: it leaves no file
        self._listener.listen(len(names.ranks))
        self.address = self._listener.getsockname()[1:].decode()
        self._addresses: Sequence[str] = ()
        self._watches: Sequence[int] = ()
        self._start_once = threading.Lock()
        self._traffic: _Traffic | None = None
        self.closed: str | None = None

    def connect(self, addresses: Sequence[str], pidfds: Sequence[int]) -> None:
        """Now the others are known: where they listen, and how to see that they end."""
        self._addresses, self._watches = addresses, pidfds

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        return self._post(Message(tensor, peer, tag, received=False, names=self._names, status_log=self._status_log))

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> Message:
        return self._post(Message(tensor, peer, tag, received=True, names=self._names, status_log=self._status_log))

    def _post(self, message: Message) -> Message:
        if self.closed:
            raise UsageError(self.closed)
        if message.peer == self._rank:
            raise UsageError(f"{self._names(self._rank)} cannot send to itself or receive from itself.")
        with self._start_once:
            if self._traffic is None:
                self._traffic = _Traffic(self._listener, self._addresses, self._watches, self._names)
        self._traffic.add(message)
        return message

    def close(self, reason: str) -> None:
        """Messages that are still waited for raise."""
        self.closed = reason
        if self._traffic is not None:
            self._traffic.stop()
        self._listener.close()


class _Traffic:
    """The thread, and all that only it touches."""

    def __init__(self, listener: socket.socket, addresses: Sequence[str], pidfds: Sequence[int], names: Names) -> None:
        self._listener, self._addresses, self._names = listener, addresses, names
        self._watches = {rank: os.dup(fd) for rank, fd in enumerate(pidfds) if fd >= 0}
        self._dead: set[int] = set()
        self._lines_out: dict[int, socket.socket] = {}
        self._lines_in: dict[int, socket.socket] = {}
        self._turns: dict[int, asyncio.Lock] = {}
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._senders: set[asyncio.Task[None]] = set()
        self._open: set[Message] = set()
        self._wanted: list[Message] = []
        self._early: list[tuple[int, int, int, bytearray]] = []
        """Read because they stood before a wanted one: source, tag, type, bytes."""
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"phalanx-messages-{names.group}", daemon=True)
        self._thread.start()
        self._has_begun.wait()

    def add(self, message: Message) -> None:
        self._loop.call_soon_threadsafe(self._receive if message.received else self._send, message)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _live(self) -> None:
        # Made here, where no Ctrl-C is raised: a loop that is half made says so when it goes.
        self._loop = asyncio.new_event_loop()
        self._has_begun.set()
        self._loop.add_reader(self._listener, self._accept)
        for rank, fd in self._watches.items():
            self._loop.add_reader(fd, self._died, rank)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        self._loop.close()
        for line in (*self._lines_in.values(), *self._lines_out.values()):
            line.close()
        for fd in self._watches.values():
            os.close(fd)
        for message in tuple(self._open):
            self._end(message, CollectiveAborted(f"the group was left while {message}."))

    def _end(self, message: Message, error: Exception) -> None:
        self._open.discard(message)
        message.end(error)

    # ---- out

    def _send(self, message: Message) -> None:
        self._open.add(message)
        task = self._loop.create_task(self._deliver(message))
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)

    async def _deliver(self, message: Message) -> None:
        peer = message.peer
        assert peer is not None, "a message that is sent has a receiver"
        try:
            async with self._turns.setdefault(peer, asyncio.Lock()):
                line = self._lines_out.get(peer) or self._connect(peer)
                await self._loop.sock_sendall(line, _HEADER.pack(message.tag, message.code, message.count))
                for start in range(0, len(message.bytes), _PIECE):
                    await self._loop.sock_sendall(line, message.bytes[start : start + _PIECE])
                    message.moved = time.monotonic()
        except OSError as error:
            if peer in self._lines_out:  # it may be in the middle of a message, or was never connected
                self._lines_out.pop(peer).close()
            self._end(message, self._why(error, peer, message))
        else:
            self._open.discard(message)
            message.finish(peer)

    def _connect(self, peer: int) -> socket.socket:
        if peer in self._dead:  # a process that it forked may hold its listener open
            raise ConnectionResetError
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._lines_out[peer] = line
        line.connect("\0" + self._addresses[peer])  # at once: there is room for every rank in the queue
        if _process_behind(line) != self._names.pids[peer]:  # the address comes from the store
            line.close()
            raise ConnectionRefusedError
        return line

    # ---- in

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except BlockingIOError:
                return
            line.setblocking(False)
            pid = _process_behind(line)
            if pid is None or pid not in self._names.pids:  # any process of the machine can connect
                line.close()
                continue
            source = self._names.pids.index(pid)
            self._lines_in[source] = line
            self._read_if_wanted(source)

    def _receive(self, message: Message) -> None:
        self._open.add(message)
        for place, (source, tag, code, data) in enumerate(self._early):
            if tag == message.tag and message.peer in (None, source):
                del self._early[place]
                self._hand_over(message, source, code, data)
                return
        self._wanted.append(message)
        for source in self._watches if message.peer is None else (message.peer,):
            self._read_if_wanted(source)

    def _read_if_wanted(self, source: int) -> None:
        if not self._is_wanted(source) or source in self._readers:
            return
        if source in self._lines_in:
            self._readers[source] = self._loop.create_task(self._read(source, self._lines_in[source]))
        elif source in self._dead:
            self._give_up(source)

    def _is_wanted(self, source: int) -> bool:
        return any(message.peer in (None, source) for message in self._wanted)

    async def _read(self, source: int, line: socket.socket) -> None:
        try:
            while self._is_wanted(source):
                await self._read_one(source, line)
        except OSError as error:
            self._lines_in.pop(source).close()
            if isinstance(error, ConnectionError):
                self._dead.add(source)
            self._give_up(source, error)
        finally:
            self._readers.pop(source, None)

    async def _read_one(self, source: int, line: socket.socket) -> None:
        header = bytearray(_HEADER.size)
        await self._fill(line, memoryview(header))
        tag, code, count = _HEADER.unpack(header)
        message = self._take_wanted(source, tag)
        if message is not None and (message.code, message.count) == (code, count):
            try:
                await self._fill(line, message.bytes, message)
            except OSError as error:
                self._end(message, self._why(error, source, message))
                raise
            self._open.discard(message)
            message.finish(source)
            return
        if message is not None:
            self._wanted.insert(0, message)  # it is still waited for, until all of what does not fit is read
        data = bytearray(count * width_of(code))
        await self._fill(line, memoryview(data))
        message = self._take_wanted(source, tag)  # perhaps asked for in the meantime
        if message is None:
            self._early.append((source, tag, code, data))
        else:
            self._hand_over(message, source, code, data)

    async def _fill(self, line: socket.socket, into: memoryview, message: Message | None = None) -> None:
        while into:
            got = await self._loop.sock_recv_into(line, into)
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

    def _hand_over(self, message: Message, source: int, code: int, data: bytearray) -> None:
        """Gives a message what was read before it was known where to."""
        count = len(data) // width_of(code)
        if (message.code, message.count) == (code, count):
            message.bytes[:] = data
            self._open.discard(message)
            message.finish(source)
            return
        sent, asked = spell(code, count), spell(message.code, message.count)
        self._end(
            message,
            CollectiveMismatch(
                f"{self._names(source)} sent {sent} where {asked} is to be received; "
                f"tag {message.tag} of group '{self._names.group}'."
            ),
        )

    # ---- the end of others

    def _died(self, rank: int) -> None:
        self._loop.remove_reader(self._watches[rank])
        self._dead.add(rank)
        self._accept()  # its connection may be waiting at the door, with its last words
        # A process that it forked may hold its ends open. What it has sent can still be read.
        if rank in self._lines_in:
            self._lines_in[rank].shutdown(socket.SHUT_RD)
        else:
            self._give_up(rank)
        if rank in self._lines_out:
            self._lines_out[rank].shutdown(socket.SHUT_WR)

    def _give_up(self, source: int, error: OSError | None = None) -> None:
        """Nothing more comes from there."""
        nobody_left = not self._watches.keys() - (self._dead - self._lines_in.keys())
        for message in [m for m in self._wanted if m.peer == source or (m.peer is None and nobody_left)]:
            self._wanted.remove(message)
            self._end(message, self._why(error, source, message))

    def _why(self, error: OSError | None, peer: int, message: Message) -> Exception:
        if error is not None and not isinstance(error, ConnectionError):  # this process lacks something
            return CollectiveError(f"{message}: {error.strerror}.")
        return PeerLost(f"{self._names(peer)} (pid {self._names.pids[peer]}) has ended or left: {message}.")
