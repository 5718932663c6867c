"""Listening sockets, who holds a port, and the addresses of this machine.

A port is never "found free" and bound later by somebody else: it is bound here, and the open socket is handed to
whoever will serve it. In between, connections wait in the backlog.
"""

from __future__ import annotations

import errno
import socket

from phalanx.errors import LaunchError, PortBusy, UsageError

LOOPBACK = "127.0.0.1"


def check_port(port: int, source: str) -> int:
    """``port`` when it can be one; ``source`` names the flag or variable in the error."""
    if not 0 <= port <= 65535:
        raise UsageError(f"{source} is {port}, but a port lies between 0 and 65535 (0 takes a free one).")
    return port


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on ``host``; port 0 takes a free one. Raises PortBusy with the owner's name."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port in TIME_WAIT after the last run is free for us; one that somebody listens on is not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortBusy(
                f"port {port} is taken by {owner(port)}. Stop that, or leave the port out to get a free one."
            ) from None
        if error.errno == errno.EACCES:
            raise LaunchError(f"port {port} needs root; take one above 1023, or leave it out.") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise LaunchError(f"{host} is not an address of this machine; give one of its own.") from None
        raise
    return listener


def is_loopback(address: str) -> bool:
    """An address that means another machine on every machine."""
    return address.startswith("127.") or address == "::1"


def interface_addresses(*, with_scope: bool = False) -> dict[str, list[str]]:
    """The addresses of each network interface of this machine, IPv4 first.

    ``with_scope``: a link-local address of IPv6 keeps its ``%eth0``, without which nothing can be sent from it.
    """
    import psutil

    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        own = [entry.address for kind in (socket.AF_INET, socket.AF_INET6) for entry in entries if entry.family == kind]
        found[name] = own if with_scope else [address.partition("%")[0] for address in own]
    return found


def owner(port: int) -> str:
    """The process that listens on ``port``, for a sentence: ``pid 4242 (python serve.py)``."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "another process (its name is hidden from this user)"
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return _describe(connection.pid)
    return "a connection that is still being closed"


def _describe(pid: int | None) -> str:
    import psutil

    if pid is None:
        return "a process of another user"
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return f"pid {pid}"
    # Its owner has chosen these words: a line break or an escape sequence is not printed as one.
    command = "".join(character if character.isprintable() else "?" for character in command)
    return f"pid {pid} ({command if len(command) <= 80 else command[:79] + '…'})"
