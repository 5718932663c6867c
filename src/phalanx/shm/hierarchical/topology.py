"""The nodes of a group, and how a block is cut for the network between them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

_PIECE_BYTES = 4 << 20
"""While one piece is on the network, the next one is reduced in memory."""
_ALIGNMENT = 64
"""Elements to which the parts of a piece are aligned: whole cache lines, whatever the type."""
_SMALL_BYTES = 128 << 10


@dataclass(frozen=True)
class Topology:
    """The nodes of a group as one of its ranks sees them. Ranks are numbers within the group."""

    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each node, in order; the nodes in the order of their first ranks."""
    rank: int
    """This rank."""

    @property
    def count(self) -> int:
        return len(self.ranks)

    @functools.cached_property
    def own_node(self) -> int:
        return self.node_of(self.rank)

    @functools.cached_property
    def local_rank(self) -> int:
        return self.local_rank_of(self.rank)

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.ranks[self.own_node]

    @functools.cached_property
    def gloo_groups(self) -> int:
        """The number of local ranks that have a gloo group across nodes: as many as the smallest node has."""
        return min(len(ranks) for ranks in self.ranks)

    @property
    def has_gloo_group(self) -> bool:
        return self.local_rank < self.gloo_groups

    @property
    def is_leader(self) -> bool:
        """The first rank of a node exchanges small blocks with the other nodes."""
        return self.local_rank == 0

    @functools.cached_property
    def all_have_gloo_groups(self) -> bool:
        """Every rank of this rank's node has a gloo group."""
        return len(self.own_ranks) == self.gloo_groups

    @property
    def gloo_peers(self) -> tuple[int, ...]:
        """The other ranks of this rank's gloo group."""
        return tuple(ranks[self.local_rank] for node, ranks in enumerate(self.ranks) if node != self.own_node)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks, node by node."""
        return tuple(rank for ranks in self.ranks for rank in ranks)

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.ranks) if rank in ranks)

    def local_rank_of(self, rank: int) -> int:
        return self.ranks[self.node_of(rank)].index(rank)

    def leader_of(self, node: int) -> int:
        return self.ranks[node][0]

    def region(self, node: int, block: int) -> slice:
        """Returns a node's part of a buffer that has a block for each rank, in `order`."""
        before = sum(len(ranks) for ranks in self.ranks[:node])
        return slice(before * block, (before + len(self.ranks[node])) * block)

    @functools.cached_property
    def small_bytes(self) -> int:
        """The largest size that the leaders exchange at once: 64 KB between two nodes.

        With more nodes a leader sends more copies, so the limit is lower.
        """
        return max(1024, _SMALL_BYTES // self.count)


def sort_into_nodes(machines: Sequence[str], rank: int) -> Topology:
    """``machines[r]`` is where rank r runs."""
    found: dict[str, list[int]] = {}
    for other, machine in enumerate(machines):
        found.setdefault(machine, []).append(other)
    return Topology(tuple(tuple(ranks) for ranks in found.values()), rank)


def cut(count: int, parts: int) -> list[slice]:
    """Cuts ``count`` elements into equal parts; the last one also has the rest."""
    each = count // parts
    return [slice(i * each, (i + 1) * each if i < parts - 1 else count) for i in range(parts)]


def pieces(count: int, width: int, gloo_groups: int) -> list[slice]:
    """Cuts ``count`` elements of ``width`` bytes into pieces that can be cut into equal parts, except the last one.

    The first piece is smaller, so that the network starts sooner.
    """
    step = gloo_groups * _ALIGNMENT
    most = max(step, _PIECE_BYTES // width // step * step)
    first = max(step, most // 4 // step * step)
    even = count // gloo_groups * gloo_groups
    edges = [0, *range(first, even, most), even, count]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]
