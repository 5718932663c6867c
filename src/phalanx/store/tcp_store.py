"""torch's TCPStore: hosting it on a socket that is already open, reaching one, and which one a script means."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
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


def why_unreachable(address: str, timeout: float) -> str:
    """Why nobody can connect to ``host:port``; empty when one can, or when it is no address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except ConnectionRefusedError:
        return f"nobody listens on {address}"
    except TimeoutError:
        return f"{address} does not answer"
    except (socket.gaierror, UnicodeError):
        return f"the name {host} cannot be resolved"
    except ValueError:
        return ""
    except OSError as error:
        return f"{address} cannot be reached ({error.strerror})"
    return ""


def of_run(environ: Mapping[str, str], port: int) -> tuple[str, int] | None:
    """The address of the launcher's own store if ``port`` is its port, by whatever name the script calls its host."""
    host, _, own = environ.get("PHALANX_STORE", "").rpartition(":")
    return (host, port) if host and own == str(port) else None


_elsewhere = threading.local()
"""``is_set`` while a store is made that is not the launcher's."""


def install() -> None:
    """An address that the script itself has chosen (tcp://host:port, MASTER_PORT) becomes part of the launcher's store.

    TORCHELASTIC_USE_AGENT_STORE makes torch believe that the launcher serves any port whatsoever, and every rank would
    wait for somebody to listen there. A world of other ranks than those of the run, of which the launcher may not know
    all, is served by its rank 0, as without a launcher.
    """
    from phalanx.torch_compat import c10d

    by_launcher = c10d.USE_AGENT_STORE.get()
    if by_launcher is not None and c10d.CREATE_STORE.wrap(functools.partial(_by_address, by_launcher)) is not None:
        c10d.USE_AGENT_STORE.wrap(_unless_elsewhere)


def _by_address(by_launcher: Callable[[], bool], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def create_c10d_store(hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
        host, _, own = os.environ.get("PHALANX_STORE", "").rpartition(":")
        if not host or not by_launcher():
            return plain(hostname, port, rank, world_size, *args, **kwargs)
        if of_run(os.environ, port) is not None:
            return plain(host, port, rank, world_size, *args, **kwargs)
        if str(world_size) == os.environ.get("WORLD_SIZE"):
            return _part(plain(host, int(own), rank, world_size, *args, **kwargs), port, rank)
        _elsewhere.is_set = True
        try:
            return plain(hostname, port, rank, world_size, *args, **kwargs)
        finally:
            _elsewhere.is_set = False

    return create_c10d_store


def _unless_elsewhere(by_launcher: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(by_launcher)
    def torchelastic_use_agent_store() -> bool:
        return by_launcher() and not getattr(_elsewhere, "is_set", False)

    return torchelastic_use_agent_store


def _part(store: Any, port: int, rank: int) -> Any:
    """Empty for every world that is made there, as a store that was served anew would be."""
    from torch.distributed import PrefixStore

    own = PrefixStore(f"tcp/{port}", store)
    turn = own.add(f"joined by rank {rank}, host {socket.gethostname()}, pid {os.getpid()}", 1)
    return PrefixStore(str(turn), own)
