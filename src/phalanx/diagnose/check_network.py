"""Checks of how a machine is reached, and of its clock. Pure functions of facts."""

from __future__ import annotations

from phalanx.diagnose.checkup import Finding
from phalanx.diagnose.facts import Facts, Network

_ALONE = "only for several machines:"


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
    if all(map(_is_loopback, found.resolved)):
        value = f"{found.host} is {addresses}, which other machines cannot reach"
        return Finding("host name", value, "warning", advice)
    if not own.intersection(found.resolved):
        return Finding("host name", f"{found.host} is {addresses}, none of this machine's", "warning", advice)
    return Finding("host name", f"{found.host} is {addresses}")


def interfaces(facts: Facts) -> Finding:
    found = facts.network
    told = [f"{each.name} {' '.join(_short(each.addresses))}" for each in found.interfaces if _short(each.addresses)]
    value = ", ".join(told) or "none has an address"
    loopbacks = [each for each in found.interfaces if any(map(_is_loopback, each.addresses))]
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
    if any(facts.network.ports.values()):
        advice = "phalanx run takes a free one by itself; where you give one (--master-port), give another"
        return Finding("ports", ", ".join(told), "warning", advice)
    return Finding("ports", ", ".join(told))


def clock(facts: Facts) -> Finding:
    found = facts.clock
    if found.is_synchronised is None:
        return Finding("clock", "the system does not say whether it is synchronised", "info")
    if found.is_synchronised:
        error = f", {1000 * found.largest_error:.0f} ms off at most" if found.largest_error is not None else ""
        return Finding("clock", f"synchronised{error}")
    where = " on the host" if facts.container else ""
    advice = f"{_ALONE} timedatectl set-ntp true{where}, or apt-get install chrony{where}"
    return Finding("clock", "not synchronised", "warning", advice)


def _reachable_address(network: Network) -> str | None:
    every = [address for each in network.interfaces if each.is_up for address in _short(each.addresses)]
    return next((address for address in every if not _is_loopback(address)), None)


def _short(addresses: tuple[str, ...]) -> list[str]:
    """Without those that lead to the next cable at most."""
    return [address for address in addresses if not address.lower().startswith("fe80:")]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
