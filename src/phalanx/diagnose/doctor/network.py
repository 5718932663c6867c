"""The ways to reach a machine: its name, interfaces, ports and clock, and the programs that start ranks elsewhere."""

from __future__ import annotations

import ctypes
import queue
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.diagnose.doctor.finding import Facts, Judgement, error, having, info, ok, on_the_host, warning
from phalanx.errors import LaunchError, PortBusy
from phalanx.system import ports as system_ports
from phalanx.system import text
from phalanx.system.ports import is_loopback

_TIMEX = struct.Struct("@Illlli")
"""The first fields of the kernel's struct timex: modes, offset, frequency, largest and estimated error, status."""
_UNSYNCHRONISED = 0x40
TOOLS = ("ssh", "srun", "mpirun", "py-spy")
_ALONE = "only for several machines:"
_PORTS = (29400, 29500)
"""The defaults of torch's rendezvous and of its launcher."""
_RESOLVE_SECONDS = 3.0
"""Seconds to wait for the name service. A broken one may take half a minute to fail."""


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    is_up: bool


@dataclass(frozen=True)
class Master:
    """The machine where the nodes of a run meet, as a scheduler's variable names it."""

    variable: str
    host: str
    resolved: tuple[str, ...]
    problem: str | None
    is_here: bool
    """By its number, this machine is the one."""


@dataclass(frozen=True)
class Network:
    host: str
    resolved: tuple[str, ...]
    """The addresses behind the host's name."""
    resolve_problem: str | None
    interfaces: tuple[Interface, ...]
    gloo_interface: str | None
    """GLOO_SOCKET_IFNAME."""
    ports: dict[int, str | None] = field(default_factory=dict)
    """The process that holds each port; None when it is free."""
    rdma: tuple[tuple[str, str, str, str], ...] = ()
    """``mlx5_0:1``, ``4: ACTIVE``, ``InfiniBand`` or ``Ethernet``, ``200 Gb/sec (4X HDR)``."""
    master: Master | None = None


@dataclass(frozen=True)
class Clock:
    is_synchronised: bool | None
    """The kernel's flag; None when it does not report one."""
    largest_error: float | None
    """Seconds, by the kernel's estimate."""


def read_network(environ: Mapping[str, str]) -> Network:
    import psutil

    host, states = socket.gethostname(), psutil.net_if_stats()
    return Network(
        host,
        *resolve(host),
        interfaces=tuple(
            Interface(name, tuple(own), name in states and states[name].isup)
            for name, own in system_ports.interface_addresses().items()
        ),
        gloo_interface=environ.get("GLOO_SOCKET_IFNAME") or None,
        ports={port: holder(port) for port in _PORTS},
        rdma=read_rdma(),
        master=_read_master(environ),
    )


def read_rdma(root: Path = Path("/sys/class/infiniband")) -> tuple[tuple[str, str, str, str], ...]:
    """The ports of InfiniBand and RoCE."""
    return tuple(
        (f"{port.parent.parent.name}:{port.name}", text(port / "state"), text(port / "link_layer"), text(port / "rate"))
        for port in sorted(root.glob("*/ports/*"))
    )


def _read_master(environ: Mapping[str, str]) -> Master | None:
    for variable in ("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "MASTER_ADDR"):
        if given := environ.get(variable):
            host = given.rpartition(":")[0].strip("[]") or given if variable == "PET_RDZV_ENDPOINT" else given
            number = environ.get("PET_NODE_RANK") or environ.get("JOB_COMPLETION_INDEX") or environ.get("RANK")
            return Master(variable, host, *resolve(host), is_here=number == "0")
    return None


def resolve(host: str, timeout: float = _RESOLVE_SECONDS) -> tuple[tuple[str, ...], str | None]:
    """The addresses behind a name; or none, and the reason."""
    answers: queue.SimpleQueue[tuple[tuple[str, ...], str | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answers.put(((), getattr(error, "strerror", None) or str(error)))
        else:
            answers.put((tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)), None))

    # In a thread of its own: the call has no timeout, and cannot be cancelled.
    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        return answers.get(timeout=timeout)
    except queue.Empty:
        return (), f"no answer within {timeout:g} s"


def holder(port: int) -> str | None:
    """The process that holds a port on any of this machine's addresses; None when it is free."""
    try:
        system_ports.listen("0.0.0.0", port).close()
    except PortBusy:
        return system_ports.owner(port)
    except (LaunchError, OSError) as error:
        return f"something unknown ({error})"
    return None


def read_clock() -> Clock:
    """Asks the kernel, which a service like chrony or systemd-timesyncd informs."""
    state = ctypes.create_string_buffer(512)
    try:
        is_known = ctypes.CDLL(None).adjtimex(state) >= 0
    except AttributeError:  # not Linux
        is_known = False
    *_, largest_error, _, status = _TIMEX.unpack_from(state)
    return Clock(not status & _UNSYNCHRONISED, largest_error / 1e6) if is_known else Clock(None, None)


# ---- checks


def host_name(facts: Facts) -> Judgement:
    """Checks that other machines can find this one by its name."""
    found = facts.network
    value = f"{found.host} is {', '.join(found.resolved)}"
    own = {address for each in found.interfaces for address in each.addresses}
    usable = (address for each in found.interfaces if each.is_up for address in _routable(each))
    address = next((each for each in usable if not is_loopback(each)), None)
    advice = f"{_ALONE} connect it to a network"
    if address is not None:
        advice = f"{_ALONE} give {address} to --master-addr or -H, or write `{address} {found.host}` into /etc/hosts"
    if facts.container == "kubernetes":
        advice = f"{_ALONE} in the pod's description subdomain, and a headless Service of that name"
    if found.resolve_problem is not None:
        return warning(f"{found.host}, not resolved ({found.resolve_problem})", advice)
    if all(map(is_loopback, found.resolved)):
        return warning(f"{value}, which other machines cannot reach", advice)
    return ok(value) if own.intersection(found.resolved) else warning(f"{value}, none of this machine's", advice)


def master(facts: Facts) -> Judgement:
    """Checks that the machine where the nodes meet can be found."""
    found = facts.network.master
    if found is None:
        return info("no variable names one, so it is --master-addr; only for several machines")
    value = f"{found.variable}={found.host}"
    advice = "start that machine, or give its address"
    if facts.container == "kubernetes":
        advice = "it takes a headless Service with publishNotReadyAddresses: true, and its name as the pods' subdomain"
    if found.problem is not None:
        return warning(f"{value} is not resolved ({found.problem})", advice)
    value += f" is {', '.join(found.resolved)}"
    own = {address for each in facts.network.interfaces for address in each.addresses}
    if found.is_here and not own.intersection(found.resolved):
        return warning(f"{value}, none of this machine's, which is node 0", advice)
    return ok(value)


def interfaces(facts: Facts) -> Judgement:
    found = facts.network
    named = [f"{each.name} {' '.join(short)}" for each in found.interfaces if (short := _routable(each))]
    value = ", ".join(named) or "none has an address"
    up = [each for each in found.interfaces if each.is_up]
    if not any(is_loopback(address) for each in up for address in each.addresses):
        return error(f"{value}; loopback is down", "ip link set lo up")
    wanted = set(found.gloo_interface.split(",")) if found.gloo_interface else set()
    if wanted - {each.name for each in up}:
        value += f"; GLOO_SOCKET_IFNAME={found.gloo_interface} is not among them"
        return error(value, "unset GLOO_SOCKET_IFNAME (phalanx run chooses one)")
    return ok(value)


def ports(facts: Facts) -> Judgement:
    """The two ports that torch takes when it is given none."""
    states = [f"{port} {'free' if who is None else f'taken by {who}'}" for port, who in facts.network.ports.items()]
    advice = "phalanx run takes a free one by itself; where you give one (--master-port), give another"
    return warning(", ".join(states), advice, any(facts.network.ports.values()))


def rdma_ports(facts: Facts) -> Judgement | None:
    """InfiniBand and RoCE, which NCCL takes between machines."""
    found = facts.network.rdma
    if not found:
        return info("none; between machines NCCL uses TCP") if facts.torch.gpus else None
    kinds = [f"{'RoCE' if kind == 'Ethernet' else kind} {rate}" for _, state, kind, rate in found if state[:2] == "4:"]
    value = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)) or "none is active"
    value += "".join(f"; {name} is {state.split(': ')[-1]}" for name, state, *_ in found if state[:2] != "4:")
    if any(state[:2] == "2:" and kind == "InfiniBand" for _, state, kind, _ in found):
        return warning(value, f"{_ALONE} INIT means no subnet manager; systemctl start opensm on one machine")
    return warning(value, f"{_ALONE} look at cables and switch (ibstat, rdma link)", not kinds)


def clock(facts: Facts) -> Judgement:
    found = facts.clock
    if found.is_synchronised is None:
        return info("the system does not report whether it is synchronised")
    if found.is_synchronised:
        return ok(
            "synchronised" + (f", {1000 * found.largest_error:.0f} ms off at most" if found.largest_error else "")
        )
    advice = "{0} timedatectl set-ntp true{1}, or apt-get install chrony{1}".format(_ALONE, on_the_host(facts))
    return warning("not synchronised", advice)


def tools(facts: Facts) -> Judgement:
    """Programs that are useful; none is required."""
    there = [name for name, path in facts.tools.items() if path]
    return info(having(there, [name for name in facts.tools if name not in there]))


def _routable(interface: Interface) -> list[str]:
    """The addresses of an interface, without those that are valid on one link only."""
    return [address for address in interface.addresses if not address.lower().startswith("fe80:")]
