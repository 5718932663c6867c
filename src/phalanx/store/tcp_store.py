"""torch's TCPStore: serving it on a socket that is already open, connecting to one, and which one a script means."""

from __future__ import annotations

import errno
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from phalanx import torch_compat
from phalanx.errors import MasterUnreachable

if TYPE_CHECKING:
    from torch.distributed import Store

P = ParamSpec("P")
_HANDSHAKE_TIMEOUT = 10.0
"""Seconds for a server that accepts connections to answer as a store does."""
_FIRST_NOTICE, _NEXT_NOTICE = 5.0, 10.0
"""Seconds until a wait is reported, and until it is reported again."""
_REFUSED = "nobody listens there"
_PASSING = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ECONNRESET)
"""Errors of a host or network that is still starting."""


def notify(text: str) -> None:
    """Prints a line of phalanx on standard error."""
    print(f"phalanx: {text}", file=sys.stderr, flush=True)


def serve(host: str, listener: socket.socket, timeout: float) -> Store:
    """Serves a store behind ``listener``, which stays open: a later store can take its place."""
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


def private() -> Store:
    """Returns a store for this process alone."""
    import torch.distributed as dist

    if hasattr(dist, "HashStore"):
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)  # on Windows


def connect(host: str, port: int, timeout: float, notify: Callable[[str], None] = notify) -> Store:
    """Connects to the store that another process serves, once it is there. ``notify`` reports a long wait."""
    from torch.distributed import DistError, TCPStore

    await_listener(host, port, timeout, notify)
    found: list[Store] = []
    failures: list[str] = []

    def connect() -> None:
        try:
            for_requests = timedelta(seconds=timeout)
            found.append(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=for_requests))
        except DistError as error:
            failures.append(str(error).strip().splitlines()[0][:200])

    # In a thread, because torch has no timeout for the handshake with a server that is no store.
    thread = threading.Thread(target=connect, name="phalanx-connect", daemon=True)
    thread.start()
    limit = min(timeout, _HANDSHAKE_TIMEOUT)
    thread.join(limit)
    if found:
        return found[0]
    reason = failures[0] if failures else f"silent for {limit:g} s"
    raise MasterUnreachable(f"{host}:{port} answers, but not as a store ({reason}); is another program on that port?")


def await_listener(host: str, port: int, timeout: float, notify: Callable[[str], None] = notify) -> None:
    """Waits for a process that listens, and for its host and name. Raises at once what no waiting can change."""
    started = time.monotonic()
    next_notice = started + _FIRST_NOTICE
    while True:
        left = started + timeout - time.monotonic()
        reason = _why_silent(host, port, max(0.05, min(left, 5.0)))
        if reason is None:
            return
        now = time.monotonic()
        if now >= next_notice:
            next_notice = now + _NEXT_NOTICE
            notify(f"waiting for the master {host}:{port} for {now - started:.0f} s: {reason}")
        if now - started >= timeout:
            raise MasterUnreachable(
                f"the master {host}:{port} was not reached within {timeout:g} s: {reason}. "
                "Is rank 0 started, with the same address and port?"
            )
        # Neither a port nor a name gives an event to wait for. A name is asked of a service that others need too.
        time.sleep(0.05 if reason == _REFUSED else 0.5)


def _why_silent(host: str, port: int, seconds: float) -> str | None:
    """Returns why nobody can connect to the master yet; None if it works."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except ConnectionRefusedError:
        return _REFUSED
    except TimeoutError:
        return "no answer"
    except socket.gaierror as error:
        return f"its name cannot be resolved ({error.strerror})"
    except UnicodeError:
        raise MasterUnreachable(f"the master's name {host!r} cannot be used: it is not a valid host name.") from None
    except OSError as error:
        if error.errno not in _PASSING:
            raise MasterUnreachable(f"the master {host}:{port} cannot be reached: {error.strerror}.") from None
        return f"{error.strerror}"
    return None


def why_unreachable(address: str, timeout: float) -> str:
    """Returns why nobody can connect to ``host:port``; empty if it works, or if that is no address."""
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
    """Returns the address of the launcher's store if ``port`` is its port, whatever the script calls its host."""
    host, _, own = environ.get("PHALANX_STORE", "").rpartition(":")
    return (host, port) if host and own == str(port) else None


def part_for_each_use(store: Store, rank: int) -> Store:
    """Returns a part of the store that is empty whenever the ranks come back to it; all do so equally often."""
    from torch.distributed import PrefixStore

    turn = store.add(f"used by rank {rank}, host {socket.gethostname()}, pid {os.getpid()}", 1)
    return PrefixStore(str(turn), store)


_outside_run = threading.local()
"""``is_set`` while a store is created that is not the launcher's."""


def install() -> None:
    """Makes an address that the script has chosen (tcp://host:port, MASTER_PORT) a part of the launcher's store.

    TORCHELASTIC_USE_AGENT_STORE makes torch believe that the launcher serves any port whatsoever, and every rank would
    wait for a process that listens there. A world of other ranks than those of the run is served by its rank 0, as
    without a launcher, which may not know all of them.
    """
    from phalanx.torch_compat import c10d

    by_launcher = c10d.USE_AGENT_STORE.get()
    if by_launcher is not None and c10d.CREATE_STORE.wrap(functools.partial(_by_address, by_launcher)) is not None:
        c10d.USE_AGENT_STORE.wrap(_unless_outside)


_Create = Callable[Concatenate[str, int, int, int, P], "Store"]


def _by_address(by_launcher: Callable[[], bool], create: _Create[P]) -> _Create[P]:
    @functools.wraps(create)
    def create_c10d_store(
        hostname: str, port: int, rank: int, world_size: int, *args: P.args, **kwargs: P.kwargs
    ) -> Store:
        host, _, own = os.environ.get("PHALANX_STORE", "").rpartition(":")
        if not host or not by_launcher():
            return create(hostname, port, rank, world_size, *args, **kwargs)
        if of_run(os.environ, port) is not None:
            return create(host, port, rank, world_size, *args, **kwargs)
        if str(world_size) == os.environ.get("WORLD_SIZE"):
            from torch.distributed import PrefixStore

            shared = create(host, int(own), rank, world_size, *args, **kwargs)
            return part_for_each_use(PrefixStore(f"tcp/{port}", shared), rank)
        _outside_run.is_set = True
        try:
            return create(hostname, port, rank, world_size, *args, **kwargs)
        finally:
            _outside_run.is_set = False

    return create_c10d_store


def _unless_outside(by_launcher: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(by_launcher)
    def torchelastic_use_agent_store() -> bool:
        return by_launcher() and not getattr(_outside_run, "is_set", False)

    return torchelastic_use_agent_store
