"""The bytes that each TCP connection of this machine has moved, by netlink (as ``ss -ti`` shows them).

What a process sends and receives by a socket is not counted among what it reads and writes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator, Mapping

from phalanx.system import procfs

_SOCK_DIAG = 4  # the netlink protocol
_BY_FAMILY = 20  # the request
_DONE, _ERROR = 3, 2
_REQUEST_AND_DUMP = 0x301
_TCP_INFO = 2  # the attribute that is asked for
_EVERY_STATE = 0xFFF
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, attributes, states; of any connection
_ANSWER_SIZE, _INODE_AT = 72, 68
_MOVED_AT = 120  # in struct tcp_info: bytes acknowledged, bytes received
_MOVED = struct.Struct("=QQ")


def moved_by_connection() -> dict[int, int]:
    """Bytes in both directions, by the inode of the connection's socket. Empty where the kernel does not tell."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            found.update(_ask(family))
    return found


def moved_by(pid: int, connections: Mapping[int, int]) -> int:
    return sum(connections.get(inode, 0) for inode in procfs.sockets(pid))


def _ask(family: int) -> Iterator[tuple[int, int]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), _EVERY_STATE)
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + request)
        while True:
            data = kernel.recv(1 << 16)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR):
                    return
                yield from _connection(data[_HEADER.size : length])
                data = data[(length + 3) & ~3 :]


def _connection(answer: bytes) -> Iterator[tuple[int, int]]:
    (inode,) = struct.unpack_from("=I", answer, _INODE_AT)
    attributes = answer[_ANSWER_SIZE:]
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == _TCP_INFO and length >= 4 + _MOVED_AT + _MOVED.size:
            yield inode, sum(_MOVED.unpack_from(attributes, 4 + _MOVED_AT))
        attributes = attributes[(max(length, 4) + 3) & ~3 :]
