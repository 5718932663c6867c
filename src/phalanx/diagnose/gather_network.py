"""Names, interfaces, ports and the clock of this machine."""

from __future__ import annotations

import ctypes
import queue
import socket
import threading
from collections.abc import Mapping

from phalanx.diagnose.facts import Clock, Interface, Network
from phalanx.errors import LaunchError, PortBusy
from phalanx.system import ports

_PORTS = (29400, 29500)
"""Torch's own: of its rendezvous, and of its launcher."""
_PATIENCE = 3.0
"""Seconds for the name service. One that is broken may take half a minute to say so."""


def network(environ: Mapping[str, str]) -> Network:
    host = socket.gethostname()
    resolved, problem = resolve(host)
    return Network(
        host=host,
        resolved=resolved,
        resolve_problem=problem,
        interfaces=_interfaces(),
        gloo_interface=environ.get("GLOO_SOCKET_IFNAME") or None,
        ports={port: holder(port) for port in _PORTS},
    )


def resolve(host: str, patience: float = _PATIENCE) -> tuple[tuple[str, ...], str | None]:
    """The addresses behind a name; or none, and why."""
    answers: queue.SimpleQueue[tuple[tuple[str, ...], str | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answers.put(((), getattr(error, "strerror", None) or str(error)))
        else:
            answers.put((tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)), None))

    # A thread of its own: the call cannot be given a limit, nor be called off.
    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        return answers.get(timeout=patience)
    except queue.Empty:
        return (), f"no answer within {patience:g} s"


def _interfaces() -> tuple[Interface, ...]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    states = psutil.net_if_stats()
    return tuple(
        Interface(
            name,
            tuple(entry.address.partition("%")[0] for entry in entries if entry.family in families),
            name in states and states[name].isup,
        )
        for name, entries in psutil.net_if_addrs().items()
    )


def holder(port: int) -> str | None:
    """Who has a port, on any of this machine's addresses; None when nobody."""
    try:
        ports.listen("0.0.0.0", port).close()
    except PortBusy:
        return ports.owner(port)
    except (LaunchError, OSError) as error:
        return f"something unknown ({error})"
    return None


class _Timex(ctypes.Structure):
    """The first fields of the kernel's struct timex; all others are read by nobody here."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


_UNSYNCHRONISED = 0x40


def clock() -> Clock:
    """By the kernel, which a service like chrony or systemd-timesyncd tells how good the clock is."""
    state = _Timex()
    try:
        result = ctypes.CDLL(None).adjtimex(ctypes.byref(state))
    except AttributeError:  # not Linux
        return Clock(None, None)
    if result < 0:
        return Clock(None, None)
    return Clock(not state.status & _UNSYNCHRONISED, state.maxerror / 1e6)
