"""Records with open file descriptors, between two processes of one machine.

The descriptors that are sent with a record arrive as new descriptors of the receiver.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from types import UnionType
from typing import Any, TypeVar, overload

from phalanx import messages
from phalanx.run_files import MOST_BYTES

T = TypeVar("T")

_HEADER = struct.Struct("=II")  # length of the record, number of descriptors
_MOST_DESCRIPTORS = 250  # the kernel takes 253 in one message


class Channel:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(left), Channel(right)

    @staticmethod
    def from_fd(fd: int) -> Channel:
        return Channel(socket.socket(fileno=fd))

    def limit(self, seconds: float) -> None:
        """Sets a timeout: a send that waits longer raises BlockingIOError, and a receive returns None."""
        interval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, interval)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Raises OSError (usually BrokenPipeError) when the other side is gone."""
        assert len(fds) <= _MOST_DESCRIPTORS, f"{len(fds)} descriptors in one message"
        text = messages.encode(message)
        header = _HEADER.pack(len(text), len(fds))
        if fds:
            socket.send_fds(self._socket, [header], list(fds))
        else:
            self._socket.sendall(header)
        self._socket.sendall(text)

    @overload
    def receive(self, shape: type[T]) -> tuple[T, list[int]] | None: ...
    @overload
    def receive(self, shape: UnionType) -> tuple[Any, list[int]] | None: ...

    def receive(self, shape: type[object] | UnionType) -> tuple[object, list[int]] | None:
        """The next message, or None when the other side is gone or silent, even in the middle of one.

        Raises ForeignData for a message of another shape.
        """
        header = b""
        fds: list[int] = []
        try:
            while len(header) < _HEADER.size:
                part, new_fds, _, _ = socket.recv_fds(self._socket, _HEADER.size - len(header), _MOST_DESCRIPTORS)
                for fd in new_fds:
                    os.set_inheritable(fd, False)  # recv_fds does not ask the kernel for it
                fds += new_fds
                if not part:
                    return None
                header += part
            length, expected = _HEADER.unpack(header)
            text = self._receive_exactly(min(length, MOST_BYTES + 1))
        except (ConnectionResetError, BlockingIOError):
            return None
        if text is None:
            return None
        assert len(fds) == expected, f"{expected} descriptors were sent, {len(fds)} arrived"
        return messages.decode(text, shape, "a channel between the processes of a run", MOST_BYTES), fds

    def _receive_exactly(self, length: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(min(length - len(parts), 1 << 20))
            if not part:
                return None
            parts += part
        return bytes(parts)

    def end(self) -> None:
        """Ends this side's messages; the other side may still send some."""
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def has_ended(self) -> bool:
        """The other side is gone."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


def anonymous_file(name: str) -> int:
    """A descriptor of a file without a name, which is gone with its last descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile  # a Python built for an older C library

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
