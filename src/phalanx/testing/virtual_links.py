"""The network of `virtual_nodes`: cables, a switch, and what can be done to them.

    node0                     the switch
    eth0 ──────────── port0 ─[line0]─ up0 ── down0 ─[lan0]─ down1 ── up1 ─[line1]─ port1 ──────────── eth0
                                                      │
                                                    down2 …

[…] is a bridge. The kernel queues what a device *sends*, not what it receives, so each node has a small bridge of its
own with a device on either side: what goes to the node is lost at ``port``, what comes from it at ``up``. The node sees
nothing of that, as with a cable that is cut far away. A queue of length zero does it, which every kernel has, unlike
tc's filters, actions and netem. A partition gives each group a ``lan`` of its own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from phalanx.errors import UsageError

Order = Callable[[int | None, str, Sequence[str]], None]
"""Has a tool (ip, tc) carry out lines in the network of a node, or (None) of the switch."""

_LOSE_EVERYTHING = "pfifo limit 0"
_BIT = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


class VirtualLinks:
    """The cables and the switch. Nodes are given by their index; the caller has checked that they are up."""

    def __init__(self, order: Order, addresses: Sequence[str], pids: Sequence[int]) -> None:
        """``pids``: of the nodes' first processes, as the switch sees them."""
        self._order = order
        self._there = set(range(len(addresses)))
        self._cuts: dict[int, set[str]] = {}
        """The directions that are cut."""
        self._bandwidth: str | None = None
        self._queues: dict[tuple[int | None, str], str] = {}
        """The queue of each device that has one, by its node (None: the switch) and its name."""
        self._lans = 1
        self._lock = threading.Lock()  # a test may cut a cable from a thread
        wires = [line for i, pid in enumerate(pids) for line in _wire(i, pid)]
        order(None, "ip", [*_bridge("lan0"), *wires])
        for node in self._there:
            order(node, "ip", _configure(node, addresses))

    def cut(self, node: int, direction: Literal["both", "in", "out"]) -> None:
        with self._lock:
            self._cuts.setdefault(node, set()).update({"in", "out"} if direction == "both" else {direction})
            self._apply()

    def restore(self, node: int) -> None:
        with self._lock:
            self._cuts.pop(node, None)
            self._apply()

    def shape(self, bandwidth: str | None) -> None:
        if bandwidth is not None:
            _bucket(bandwidth)  # complains before anything is changed
        with self._lock:
            self._bandwidth = bandwidth
            self._apply()

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        with self._lock:
            lines: list[str] = []
            for lan in range(self._lans, len(groups)):
                lines += _bridge(f"lan{lan}")
            for lan, group in enumerate(groups):
                lines += [f"link set down{node} master lan{lan}" for node in group]
            lines += [f"link del lan{lan}" for lan in range(len(groups), self._lans)]
            self._order(None, "ip", lines)
            self._lans = len(groups)

    def forget(self, node: int) -> None:
        """The node is gone, and its end of the cable with it; what the switch still has of it stays as it is."""
        with self._lock:
            self._there.discard(node)
            for queue in ((node, "eth0"), (None, f"port{node}"), (None, f"up{node}")):
                self._queues.pop(queue, None)

    def _wanted(self) -> dict[tuple[int | None, str], str]:
        """The queue of each device that should have one."""
        wanted: dict[tuple[int | None, str], str] = {}
        for node in self._there:
            if self._bandwidth is not None:
                # At either end: a program that sends too much has to wait, as for a network adapter, and not to lose it
                # on the way; and what several nodes send to one has to share its cable.
                wanted[node, "eth0"] = wanted[None, f"port{node}"] = _bucket(self._bandwidth)
            cuts = self._cuts.get(node, set())
            if "in" in cuts:
                wanted[None, f"port{node}"] = _LOSE_EVERYTHING
            if "out" in cuts:
                wanted[None, f"up{node}"] = _LOSE_EVERYTHING
        return wanted

    def _apply(self) -> None:
        """Sets the queues as they should be, with one call of tc for each node where something changes."""
        wanted = self._wanted()
        orders: dict[int | None, list[str]] = {}
        for node, device in self._queues.keys() - wanted.keys():
            orders.setdefault(node, []).append(f"qdisc del dev {device} root")
        for (node, device), queue in wanted.items():
            if self._queues.get((node, device)) != queue:
                orders.setdefault(node, []).append(f"qdisc replace dev {device} root {queue}")
        for node, lines in orders.items():
            self._order(node, "tc", lines)
        self._queues = wanted


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge mcast_snooping 0", f"link set {name} up"]


def _mac(node: int) -> str:
    return f"02:00:0a:4d:00:{node + 1:02x}"  # locally administered; the rest is the address


def _wire(node: int, pid: int) -> list[str]:
    """The node's cable, from its eth0 to the middle of the switch."""
    return [
        *_bridge(f"line{node}"),
        f"link add port{node} type veth peer name eth0 address {_mac(node)} netns {pid}",
        f"link add up{node} type veth peer name down{node}",
        f"link set port{node} master line{node} up",
        f"link set up{node} master line{node} up",
        f"link set down{node} master lan0 up",
    ]


def _configure(own: int, addresses: Sequence[str]) -> list[str]:
    """Neighbours are permanent: one that is cut off would otherwise be "No route to host" after three seconds."""
    neighbours = [
        f"neighbour add {address} lladdr {_mac(node)} nud permanent dev eth0"
        for node, address in enumerate(addresses)
        if node != own
    ]
    return ["link set lo up", "link set eth0 up", f"address add {addresses[own]}/24 dev eth0", *neighbours]


def bits_per_second(bandwidth: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", bandwidth)
    if found is None or float(found[1]) == 0:
        raise UsageError(f"{bandwidth!r} is not a bandwidth; write it like 100mbit or 2.5gbit.")
    return int(float(found[1]) * _BIT[found[2]])


def _bucket(bandwidth: str) -> str:
    """A token bucket that lets two milliseconds through at once, and at least what fits many packets."""
    rate = bits_per_second(bandwidth)
    return f"tbf rate {rate}bit burst {max(1 << 15, rate // 8 // 500)} latency 50ms"
