"""Who is where: the ranks of a group sorted into nodes, and how a block is cut for the way between them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

_PIECE_BYTES = 4 << 20
"""While one piece is on the network, the next is being added up in memory."""
_LINE_ELEMENTS = 64
"""Parts of a piece begin at whole cache lines, whatever the type."""
_SMALL_BYTES = 128 << 10


@dataclass(frozen=True)
class Topology:
    """The nodes of a group as one of its ranks sees them. Ranks are numbers within the group."""

    members: tuple[tuple[int, ...], ...]
    """The ranks of each node, in order; the nodes in the order of their first ranks."""
    rank: int
    """The one that looks."""

    @property
    def count(self) -> int:
        return len(self.members)

    @functools.cached_property
    def here(self) -> int:
        """The own node."""
        return self.node_of(self.rank)

    @functools.cached_property
    def local(self) -> int:
        """The own place on it."""
        return self.place_of(self.rank)

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks of the own node."""
        return self.members[self.here]

    @functools.cached_property
    def gloo_groups(self) -> int:
        """How many ranks of each node talk to other nodes: as many as the smallest node has."""
        return min(len(ranks) for ranks in self.members)

    @property
    def has_gloo_group(self) -> bool:
        return self.local < self.gloo_groups

    @property
    def is_leader(self) -> bool:
        """The first rank of a node speaks for it."""
        return self.local == 0

    @functools.cached_property
    def is_even_here(self) -> bool:
        """Whether every rank of the own node has a rail."""
        return len(self.mates) == self.gloo_groups

    @property
    def rail_peers(self) -> tuple[int, ...]:
        """The ranks at the other ends of the own rail."""
        return tuple(ranks[self.local] for node, ranks in enumerate(self.members) if node != self.here)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks, node by node."""
        return tuple(rank for ranks in self.members for rank in ranks)

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.members) if rank in ranks)

    def place_of(self, rank: int) -> int:
        return self.members[self.node_of(rank)].index(rank)

    def leader_of(self, node: int) -> int:
        return self.members[node][0]

    def region(self, node: int, block: int) -> slice:
        """Where a node's blocks lie in a buffer that has one for each rank, in `order`."""
        before = sum(len(ranks) for ranks in self.members[:node])
        return slice(before * block, (before + len(self.members[node])) * block)

    @functools.cached_property
    def small_bytes(self) -> int:
        """Up to this size the leaders send each other everything at once: 64 KB between two nodes.

        With many nodes a leader sends as many copies, so that the limit falls.
        """
        return max(1024, _SMALL_BYTES // self.count)


def sort_into_nodes(machines: Sequence[str], rank: int) -> Topology:
    """``machines[r]`` is where rank r runs."""
    found: dict[str, list[int]] = {}
    for other, machine in enumerate(machines):
        found.setdefault(machine, []).append(other)
    return Topology(tuple(tuple(ranks) for ranks in found.values()), rank)


def cut(count: int, parts: int) -> list[slice]:
    """``count`` elements in equal parts; the last one also has what is left over."""
    each = count // parts
    return [slice(i * each, (i + 1) * each if i < parts - 1 else count) for i in range(parts)]


def pieces(count: int, width: int, gloo_groups: int) -> list[slice]:
    """A block of ``count`` elements of ``width`` bytes in pieces that can be cut into equal parts, but for the last.

    The first one is smaller, so that the network has something to do sooner.
    """
    step = gloo_groups * _LINE_ELEMENTS
    most = max(step, _PIECE_BYTES // width // step * step)
    first = max(step, most // 4 // step * step)
    even = count // gloo_groups * gloo_groups
    edges = [0, *range(first, even, most), even, count]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]
