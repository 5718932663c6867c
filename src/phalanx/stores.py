"""torch's TCPStore: hosting it on a socket that is already open, and reaching one."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from phalanx import torch_compat
from phalanx.errors import MasterUnreachable

_HANDSHAKE = 10.0
"""Seconds for a server that accepts connections to answer as a store does."""
_FIRST_WORD, _NEXT_WORD = 3.0, 10.0
"""Seconds until a wait is told, and told again."""


def serve(host: str, listener: socket.socket, timeout: float) -> Any:
    """A store behind ``listener``, which stays open: a later store can take its place."""
    from torch.distributed import TCPStore

    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=os.dup(listener.fileno()),  # the store closes what it is given
        **torch_compat.server_options(),
    )


def private() -> Any:
    """A store for this process alone."""
    import torch.distributed as dist

    if hasattr(dist, "HashStore"):
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)  # on Windows


def connect(host: str, port: int, timeout: float, tell: Callable[[str], None]) -> Any:
    """The store that somebody else hosts, when it is there. ``tell`` hears of a long wait."""
    from torch.distributed import DistError, TCPStore

    _await_listener(host, port, timeout, tell)
    found: list[Any] = []
    failures: list[str] = []

    def connect() -> None:
        try:
            limit = timedelta(seconds=timeout)
            found.append(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
        except DistError as error:
            failures.append(str(error).strip().splitlines()[0][:200])

    # In a thread, because the first words with a server that is no store have no timeout inside torch.
    thread = threading.Thread(target=connect, name="phalanx-connect", daemon=True)
    thread.start()
    patience = min(timeout, _HANDSHAKE)
    thread.join(patience)
    if found:
        return found[0]
    reason = failures[0] if failures else f"silent for {patience:g} s"
    raise MasterUnreachable(f"{host}:{port} answers, but not as a store ({reason}); is another program on that port?")


def _await_listener(host: str, port: int, timeout: float, tell: Callable[[str], None]) -> None:
    """Waits for somebody to listen; what waiting cannot heal is an error at once."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host is like that"
        raise MasterUnreachable(f"the master's name {host!r} cannot be resolved ({why}).") from None
    started = time.monotonic()
    told = started + _FIRST_WORD
    while True:
        left = started + timeout - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.05, min(left, 5.0))).close()
            return
        except ConnectionRefusedError:
            reason = "nobody listens there"
        except TimeoutError:
            reason = "no answer"
        except OSError as error:
            raise MasterUnreachable(f"the master {host}:{port} cannot be reached: {error.strerror}.") from None
        now = time.monotonic()
        if now >= told:
            told = now + _NEXT_WORD
            tell(f"waiting for the master {host}:{port} for {now - started:.0f} s: {reason}")
        if now - started >= timeout:
            raise MasterUnreachable(
                f"the master {host}:{port} was not reached within {timeout:g} s: {reason}. "
                "Is rank 0 started, with the same address and port?"
            )
        time.sleep(0.05)  # a port that is not open yet gives no event to wait for
