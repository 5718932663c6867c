"""How a machine is reached: its name, interfaces, ports and clock, and the programs that start ranks elsewhere."""

from __future__ import annotations

import ctypes
import queue
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.diagnose.doctor.finding import Facts, Finding, having, judged
from phalanx.errors import LaunchError, PortBusy
from phalanx.system import ports as system_ports
from phalanx.system.ports import is_loopback

_TIMEX = struct.Struct("@Illlli")
"""The first fields of the kernel's struct timex: modes, offset, frequency, largest and estimated error, status."""
_UNSYNCHRONISED = 0x40
TOOLS = ("ssh", "srun", "mpirun", "py-spy")
_ALONE = "only for several machines:"
_PORTS = (29400, 29500)
"""Torch's own: of its rendezvous, and of its launcher."""
_RESOLVE_SECONDS = 3.0
"""Seconds for the name service. One that is broken may take half a minute to say so."""


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    is_up: bool


@dataclass(frozen=True)
class Network:
    host: str
    resolved: tuple[str, ...]
    """Addresses that the host's name stands for."""
    resolve_problem: str | None
    interfaces: tuple[Interface, ...]
    gloo_interface: str | None
    """GLOO_SOCKET_IFNAME."""
    ports: dict[int, str | None] = field(default_factory=dict)
    """Who holds each; None when it is free."""


@dataclass(frozen=True)
class Clock:
    is_synchronised: bool | None
    """By the kernel's flag; None when it does not tell."""
    largest_error: float | None
    """Seconds, as the kernel estimates it."""


# ---- reading


def read_network(environ: Mapping[str, str]) -> Network:
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


def resolve(host: str, patience: float = _RESOLVE_SECONDS) -> tuple[tuple[str, ...], str | None]:
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

    states = psutil.net_if_stats()
    found = system_ports.interface_addresses()
    return tuple(Interface(name, tuple(own), name in states and states[name].isup) for name, own in found.items())


def holder(port: int) -> str | None:
    """Who has a port, on any of this machine's addresses; None when nobody."""
    try:
        system_ports.listen("0.0.0.0", port).close()
    except PortBusy:
        return system_ports.owner(port)
    except (LaunchError, OSError) as error:
        return f"something unknown ({error})"
    return None


def read_clock() -> Clock:
    """By the kernel, which a service like chrony or systemd-timesyncd tells how good the clock is."""
    state = ctypes.create_string_buffer(512)
    try:
        is_known = ctypes.CDLL(None).adjtimex(state) >= 0
    except AttributeError:  # not Linux
        is_known = False
    *_, largest_error, _, status = _TIMEX.unpack_from(state)
    return Clock(not status & _UNSYNCHRONISED, largest_error / 1e6) if is_known else Clock(None, None)


# ---- judgement


def host_name(facts: Facts) -> Finding:
    """Whether other machines could find this one by its name."""
    found = facts.network
    addresses = ", ".join(found.resolved)
    own = {address for interface in found.interfaces for address in interface.addresses}
    address = _reachable_address(found)
    if address is None:
        advice = f"{_ALONE} connect it to a network"
    else:
        advice = f"{_ALONE} give {address} to --master-addr or -H, or write `{address} {found.host}` into /etc/hosts"
    if found.resolve_problem is not None:
        return Finding("host name", f"{found.host}, not resolved ({found.resolve_problem})", "warning", advice)
    if all(map(is_loopback, found.resolved)):
        value = f"{found.host} is {addresses}, which other machines cannot reach"
        return Finding("host name", value, "warning", advice)
    if not own.intersection(found.resolved):
        return Finding("host name", f"{found.host} is {addresses}, none of this machine's", "warning", advice)
    return Finding("host name", f"{found.host} is {addresses}")


def interfaces(facts: Facts) -> Finding:
    found = facts.network
    told = [f"{each.name} {' '.join(_short(each.addresses))}" for each in found.interfaces if _short(each.addresses)]
    value = ", ".join(told) or "none has an address"
    loopbacks = [each for each in found.interfaces if any(map(is_loopback, each.addresses))]
    if not any(each.is_up for each in loopbacks):
        return Finding("interfaces", f"{value}; loopback is down", "error", "ip link set lo up")
    wanted = found.gloo_interface.split(",") if found.gloo_interface else []
    missing = [name for name in wanted if name not in {each.name for each in found.interfaces if each.is_up}]
    if missing:
        value += f"; GLOO_SOCKET_IFNAME={found.gloo_interface} is not among them"
        return Finding("interfaces", value, "error", "unset GLOO_SOCKET_IFNAME (phalanx run chooses one)")
    return Finding("interfaces", value)


def ports(facts: Facts) -> Finding:
    """The two that torch takes when it is told none."""
    told = [f"{port} {'free' if who is None else f'taken by {who}'}" for port, who in facts.network.ports.items()]
    advice = "phalanx run takes a free one by itself; where you give one (--master-port), give another"
    return judged("ports", ", ".join(told), advice, warning=any(facts.network.ports.values()))


def clock(facts: Facts) -> Finding:
    found = facts.clock
    if found.is_synchronised is None:
        return Finding("clock", "the system does not report whether it is synchronised", "info")
    if found.is_synchronised:
        error = f", {1000 * found.largest_error:.0f} ms off at most" if found.largest_error is not None else ""
        return Finding("clock", f"synchronised{error}")
    where = " on the host" if facts.container else ""
    advice = f"{_ALONE} timedatectl set-ntp true{where}, or apt-get install chrony{where}"
    return Finding("clock", "not synchronised", "warning", advice)


def tools(facts: Facts) -> Finding:
    """Nothing that must be there."""
    there = [name for name, path in facts.tools.items() if path]
    missing = [name for name, path in facts.tools.items() if not path]
    return Finding("tools", having(there, missing), "info")


def _reachable_address(network: Network) -> str | None:
    every = [address for each in network.interfaces if each.is_up for address in _short(each.addresses)]
    return next((address for address in every if not is_loopback(address)), None)


def _short(addresses: tuple[str, ...]) -> list[str]:
    """Without those that lead to the next cable at most."""
    return [address for address in addresses if not address.lower().startswith("fe80:")]
