"""Large blocks across nodes: cut into pieces, so that while some are on the network, others are added up in memory.

Every piece is cut into a part for each rail. On a node where every rank has a rail, the parts are made by one
reduce_scatter and put together by one all_gather; on a larger node, part by part.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.shm.hierarchical.agreement import Agreement
from phalanx.shm.hierarchical.gloo_groups import GlooGroup, Sent
from phalanx.shm.hierarchical.reduction_plan import Reduction
from phalanx.shm.hierarchical.topology import cut, pieces
from phalanx.shm.node.tensors import as_bytes

_AHEAD = 3
"""So many pieces may be on the network while the next one is added up."""

_InMemory = Callable[[Tensor], None]


def _nothing(piece: Tensor) -> None:
    pass


@dataclass(frozen=True)
class _Job:
    """What is done with a piece, one after the other."""

    piece: Tensor
    before: _InMemory
    send: Callable[[GlooGroup, Tensor], Sent]
    """For each part, by the rank that has its rail."""
    after: _InMemory


class Pipeline:
    """The way over the rails. All ranks of all nodes have agreed before."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._nodes, self._local = agreement, agreement.nodes, agreement.local

    def reduce(self, block: Tensor, reduction: Reduction) -> None:
        """To all ranks, in place."""

        def add_up(piece: Tensor) -> None:
            self._add_up(piece, reduction)

        def send(gloo_group: GlooGroup, part: Tensor) -> Sent:
            return gloo_group.all_reduce(part, reduction)

        self._run(_Job(piece, add_up, send, self._share) for piece in self._pieces(block))

    def spread(self, blocks: Sequence[Tensor | None], before: _InMemory = _nothing) -> None:
        """Block n goes from node n to all others. On node n its ranks have it, or get it by ``before``."""
        jobs = [self._spread_one(origin, block, before) for origin, block in enumerate(blocks) if block is not None]
        # In turns: so the ways from all nodes are used at the same time.
        self._run(job for turn in itertools.zip_longest(*jobs) for job in turn if job is not None)
        self._local.barrier()  # where nothing came in, nobody goes on before everything has gone out

    def _spread_one(self, origin: int, block: Tensor, before: _InMemory) -> Iterator[_Job]:
        is_here = origin == self._nodes.here

        def send(gloo_group: GlooGroup, part: Tensor) -> Sent:
            return gloo_group.broadcast(part, origin)

        for piece in self._pieces(as_bytes(block)):
            yield _Job(piece, before if is_here else _nothing, send, _nothing if is_here else self._share)

    def _pieces(self, block: Tensor) -> Iterator[Tensor]:
        return (block[where] for where in pieces(block.numel(), block.itemsize, self._nodes.gloo_groups))

    def _run(self, jobs: Iterable[_Job]) -> None:
        under_way: deque[tuple[_Job, Sent | None]] = deque()
        for job in jobs:
            job.before(job.piece)
            under_way.append((job, self._send(job)))
            if len(under_way) > _AHEAD:
                self._finish(*under_way.popleft())
        while under_way:
            self._finish(*under_way.popleft())

    def _send(self, job: _Job) -> Sent | None:
        gloo_group = self._agreement.gloo_group
        if gloo_group is None:
            return None
        part = self._parts(job.piece)[self._nodes.local]
        return job.send(gloo_group, part) if part.numel() else None

    def _finish(self, job: _Job, sent: Sent | None) -> None:
        if sent is not None:
            self._agreement.wait(sent.work, self._nodes.rail_peers)
            sent.then()
        job.after(job.piece)

    # ---- in the memory of the node

    def _parts(self, piece: Tensor) -> list[Tensor]:
        return [piece[where] for where in cut(piece.numel(), self._nodes.gloo_groups)]

    def _is_even(self, piece: Tensor) -> bool:
        return self._nodes.is_even_here and piece.numel() % self._nodes.gloo_groups == 0

    def _add_up(self, piece: Tensor, reduction: Reduction) -> None:
        """Over the ranks of this node: each part is whole on the rank whose rail it takes."""
        parts = self._parts(piece)
        if self._is_even(piece):
            self._local.reduce_scatter(parts[self._nodes.local], piece, reduction.within)
            return
        for place, part in enumerate(parts):
            if part.numel():
                self._local.reduce(part, reduction.within, place)

    def _share(self, piece: Tensor) -> None:
        """Each part from the rank whose rail it took to all ranks of this node."""
        parts = self._parts(piece)
        if self._is_even(piece):
            self._local.all_gather(piece, parts[self._nodes.local])
            return
        for place, part in enumerate(parts):
            if part.numel():
                self._local.broadcast(part, place)
