"""The network of this machine that leads to the other nodes."""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.system.ports import interface_addresses, is_loopback

_INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True)
class Route:
    """The route of this machine to the first node, and its address for the others."""

    master: str
    """The first node's address."""
    address: str
    """This machine's own, on the same network."""
    interface: str
    is_asked: bool = False
    """By --interface or --local-addr."""

    def settings(self) -> dict[str, str]:
        """Returns the variables by which gloo and NCCL take this interface.

        NCCL gets none if it would begin with this one by itself and use only hardware beside it, or with InfiniBand.
        A bridge or a tunnel may lead to no other node. Without ``=`` a name also means all those that begin with it.
        """
        names = [name for name, own in interface_addresses().items() if own and not name.startswith(("docker", "lo"))]
        is_hardware = all((_INTERFACES / name / "device").exists() for name in names if name != self.interface)
        is_right = (is_hardware and names[:1] == [self.interface]) or any(name.startswith("ib") for name in names)
        found = {"GLOO_SOCKET_IFNAME": self.interface}
        return found if is_right and not self.is_asked else {**found, "NCCL_SOCKET_IFNAME": f"={self.interface}"}


class NotYet(UsageError):
    """A name or a route is missing, which may appear: in a cluster, names are made while the machines start."""


_NOTICE_AFTER = 5.0
_RETRY_AFTER = 0.5


def find_route(master: str, interface: str | None = None, local_addr: str | None = None) -> Route:
    """Asks the kernel for the route of a packet to the master; nothing is sent."""
    target = resolve(master, "the master's name")
    if local_addr is not None:
        address = resolve(local_addr, "--local-addr")
        if not is_own(address):
            raise UsageError(f"--local-addr {local_addr} is not an address of this machine; give one of its own.")
        return Route(target, address, _interface_of(address), is_asked=True)
    address = _address_of(interface) if interface else _own_address_towards(target, master)
    return Route(target, address, interface or _interface_of(address), is_asked=interface is not None)


def await_route(find: Callable[[], Route], timeout: float) -> Route:
    """Calls ``find`` until it raises NotYet no more, ``timeout`` seconds at most; prints once what is waited for."""
    started, is_told = time.monotonic(), False
    while True:
        try:
            return find()
        except NotYet as error:
            waited = time.monotonic() - started
            if waited >= timeout:
                raise UsageError(f"after {timeout:g} s {error}") from None
            if waited >= _NOTICE_AFTER and not is_told:
                is_told = True
                print(f"phalanx: waiting, {timeout:g} s at most: {error}", file=sys.stderr, flush=True)
        time.sleep(_RETRY_AFTER)  # a name gives no event to wait for


def resolve(host: str, what: str) -> str:
    """Returns the address of a host, which must not be loopback; ``what`` begins the error."""
    try:
        addresses = _addresses(host)
    except socket.gaierror as error:
        raise NotYet(f"{what} {host!r} cannot be resolved ({error.strerror}); give its address.") from None
    except UnicodeError:
        raise UsageError(f"{what} {host!r} cannot be used: it is not a valid host name.") from None
    for address in addresses:
        if not is_loopback(address):
            return address
    raise UsageError(
        f"{what} {host!r} resolves to {addresses[0]}, which other machines cannot reach; "
        "give its address on the network."
    )


def is_own(address: str) -> bool:
    """Returns True for an address of one of this machine's interfaces."""
    return address in {found for addresses in interface_addresses().values() for found in addresses}


def leads_here(name: str) -> bool:
    """Returns True for a name or address of this machine, False for one that cannot be resolved."""
    try:
        return any(is_loopback(address) or is_own(address) for address in _addresses(name))
    except (socket.gaierror, UnicodeError):
        return False


def leads_to_loopback(name: str) -> bool:
    """Returns True for a name that this machine knows by addresses of its loopback interface alone."""
    try:
        return all(map(is_loopback, _addresses(name)))
    except (socket.gaierror, UnicodeError):
        return False


def _addresses(host: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)]


def _own_address_towards(target: str, name: str) -> str:
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError as error:
            if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
                raise NotYet(f"no network of this machine leads to {name} ({target}); check the address.") from None
            raise
        own = probe.getsockname()[0]
    return target if is_own(target) else own


def _interface_of(address: str) -> str:
    for name, addresses in interface_addresses().items():
        if address in addresses:
            return name
    raise AssertionError(f"the kernel chose {address}, which belongs to no interface")


def _address_of(interface: str) -> str:
    found = interface_addresses()
    if interface not in found or not found[interface]:
        there = ", ".join(name for name, addresses in found.items() if addresses)
        raise UsageError(f"--interface {interface} does not exist or has no address; there are {there}.")
    return found[interface][0]
