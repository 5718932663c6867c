"""Moves large blocks across nodes in pieces: while some are on the network, others are reduced in memory.

Every piece is cut into a part for each gloo group. On a node where every rank has one, one reduce_scatter makes the
parts and one all_gather joins them; on a larger node it is done part by part.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.shm.hierarchical.agreement import Agreement
from phalanx.shm.hierarchical.gloo_groups import GlooGroup, Transfer
from phalanx.shm.hierarchical.reduction_plan import Reduction
from phalanx.shm.hierarchical.topology import cut, pieces
from phalanx.shm.node.tensors import as_bytes

_AHEAD = 3
"""Pieces that may be on the network while the next one is reduced."""

_InMemory = Callable[[Tensor], None]


def _nothing(piece: Tensor) -> None:
    pass


@dataclass(frozen=True)
class _Job:
    """The three steps for one piece."""

    piece: Tensor
    before: _InMemory
    send: Callable[[GlooGroup, Tensor], Transfer]
    """Called for each part, by the rank with its gloo group."""
    after: _InMemory


class Pipeline:
    """Exchanges by the gloo groups across nodes. All ranks have agreed on the collective before."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._nodes, self._local = agreement, agreement.nodes, agreement.local

    def reduce(self, block: Tensor, reduction: Reduction) -> None:
        """Reduces a block over all ranks, in place."""

        def reduce_piece(piece: Tensor) -> None:
            self._reduce_on_node(piece, reduction)

        def send(gloo_group: GlooGroup, part: Tensor) -> Transfer:
            return gloo_group.all_reduce(part, reduction)

        self._run(_Job(piece, reduce_piece, send, self._share) for piece in self._pieces(block))

    def spread(self, blocks: Sequence[Tensor | None], before: _InMemory = _nothing) -> None:
        """Sends block n from node n to all other nodes. The ranks of node n have it, or get it by ``before``."""
        jobs = [self._spread_one(origin, block, before) for origin, block in enumerate(blocks) if block is not None]
        # In turns, so that all nodes send at the same time.
        self._run(job for turn in itertools.zip_longest(*jobs) for job in turn if job is not None)
        self._local.barrier()  # a node that only sends must not return before all is sent

    def _spread_one(self, origin: int, block: Tensor, before: _InMemory) -> Iterator[_Job]:
        is_here = origin == self._nodes.own_node

        def send(gloo_group: GlooGroup, part: Tensor) -> Transfer:
            return gloo_group.broadcast(part, origin)

        for piece in self._pieces(as_bytes(block)):
            yield _Job(piece, before if is_here else _nothing, send, _nothing if is_here else self._share)

    def _pieces(self, block: Tensor) -> Iterator[Tensor]:
        return (block[where] for where in pieces(block.numel(), block.itemsize, self._nodes.gloo_groups))

    def _run(self, jobs: Iterable[_Job]) -> None:
        under_way: deque[tuple[_Job, Transfer | None]] = deque()
        for job in jobs:
            job.before(job.piece)
            under_way.append((job, self._send(job)))
            if len(under_way) > _AHEAD:
                self._finish(*under_way.popleft())
        while under_way:
            self._finish(*under_way.popleft())

    def _send(self, job: _Job) -> Transfer | None:
        gloo_group = self._agreement.gloo_group
        if gloo_group is None:
            return None
        part = self._parts(job.piece)[self._nodes.local_rank]
        return job.send(gloo_group, part) if part.numel() else None

    def _finish(self, job: _Job, sent: Transfer | None) -> None:
        if sent is not None:
            self._agreement.wait(sent.work, self._nodes.gloo_peers)
            sent.finish()
        job.after(job.piece)

    # ---- in the memory of the node

    def _parts(self, piece: Tensor) -> list[Tensor]:
        return [piece[where] for where in cut(piece.numel(), self._nodes.gloo_groups)]

    def _is_even(self, piece: Tensor) -> bool:
        return self._nodes.all_have_gloo_groups and piece.numel() % self._nodes.gloo_groups == 0

    def _reduce_on_node(self, piece: Tensor, reduction: Reduction) -> None:
        """Reduces over the ranks of this node. Each rank with a gloo group gets its part."""
        parts = self._parts(piece)
        if self._is_even(piece):
            self._local.reduce_scatter(parts[self._nodes.local_rank], piece, reduction.within)
            return
        for local_rank, part in enumerate(parts):
            if part.numel():
                self._local.reduce(part, reduction.within, local_rank)

    def _share(self, piece: Tensor) -> None:
        """Sends each part from the rank with its gloo group to all ranks of this node."""
        parts = self._parts(piece)
        if self._is_even(piece):
            self._local.all_gather(piece, parts[self._nodes.local_rank])
            return
        for local_rank, part in enumerate(parts):
            if part.numel():
                self._local.broadcast(part, local_rank)
