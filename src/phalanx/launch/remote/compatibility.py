"""Compares the answers of all hosts, and derives the master's address and the ranks of each host from them."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import LaunchError
from phalanx.launch.output.wire_protocol import Hello
from phalanx.launch.remote.host_connection import HostConnection
from phalanx.launch.spec.launch_spec import LaunchSpec, placements
from phalanx.system.ports import LOOPBACK, is_loopback


def compare(connections: Sequence[HostConnection]) -> None:
    """Raises an error that names each host with other versions than the first."""
    first, *others = connections
    wrong = []
    for other in others:
        for what, found in _versions(other).items():
            expected = _versions(first)[what]
            if found != expected:
                wrong.append(
                    f"{other.name} has {what} {found}, but {first.name} has {expected}; install the same on all hosts."
                )
    if wrong:
        raise LaunchError("\n".join(wrong))


def master(connections: Sequence[HostConnection], spec: LaunchSpec) -> tuple[str, int]:
    """Returns the address of the first host as the others reach it, and a port."""
    first, *others = connections
    port = spec.master_port or _hello(first).port or 0
    if spec.master_addr != LOOPBACK:
        return spec.master_addr, port
    if first.transport.kind == "ssh":
        candidates = [_hello(first).server]
    else:
        candidates = [_hello(other).client for other in others if first.transport.kind == "here"]
        candidates += [_hello(other).first for other in others]
    for address in candidates:
        # An address with a scope means another network on every machine.
        if address and not is_loopback(address) and "%" not in address:
            return address, port
    raise LaunchError(
        f"it is not known by which address the other hosts reach {first.name}; give it with --master-addr."
    )


def summary(connections: Sequence[HostConnection]) -> str:
    """Returns the hosts and their ranks in a line."""
    sizes = [_hello(connection).nproc for connection in connections]
    everyone = placements(sizes)
    parts = []
    for connection in connections:
        ranks = [place.rank for place in everyone if place.node == connection.node]
        parts.append(f"{connection.name} {ranks[0]}" + (f"-{ranks[-1]}" if len(ranks) > 1 else ""))
    text = f"{sum(sizes)} rank{'s' * (sum(sizes) > 1)} on {len(connections)} host{'s' * (len(connections) > 1)}"
    return f"{text}: {', '.join(parts[:8])}{', …' if len(parts) > 8 else ''}"


def _versions(connection: HostConnection) -> dict[str, str]:
    hello = _hello(connection)
    return {"Python": hello.python, "torch": hello.torch, "phalanx": hello.phalanx}


def _hello(connection: HostConnection) -> Hello:
    assert connection.hello is not None, "all have answered"
    return connection.hello
