"""The collectives of a group whose ranks are on several nodes: the same methods as `NodeCollectives` has for one node.

Small blocks are reduced in the memory of each node, exchanged by the leaders, and spread in memory. For large ones
every rank of a node reduces a part and exchanges it in a gloo group with the same local ranks of the other nodes:
the network carries every byte once for each node, not once for each rank. gather, scatter and all_to_all, which are
rare, go from rank to rank by gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from phalanx.native import library
from phalanx.native.library import Signature
from phalanx.shm.hierarchical import reduction_plan
from phalanx.shm.hierarchical.agreement import Agreement
from phalanx.shm.hierarchical.gloo_groups import NEVER
from phalanx.shm.hierarchical.pipeline import Pipeline
from phalanx.shm.hierarchical.reduction_plan import Reduction
from phalanx.shm.node import failures
from phalanx.shm.node.tensors import (
    Blocks,
    Operator,
    as_bytes,
    code_of,
    flat,
    memory,
    numbers_of,
    read,
    real,
    typed,
    write,
)

_PART_BYTES = 1 << 20
"""Bytes that gloo moves between two ranks at a time: it does not report progress, and a timeout counts while nothing
moves."""


class HierarchicalCollectives:
    """The collectives of one group. Its caller runs one at a time."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._nodes, self._gloo = agreement, agreement.nodes, agreement.gloo
        self._rank, self._size = self._nodes.rank, len(self._nodes.order)
        self._local, self._large = agreement.local, Pipeline(agreement)
        self.prepared: dict[tuple[torch.dtype, int], Callable[[Tensor], None]] = {}
        """Always empty: the network takes much longer than making a call."""
        self.set_timeout = agreement.set_timeout
        self.abort, self.close, self.forked = agreement.abort, agreement.close, agreement.forked

    # ---- reductions

    def all_reduce(self, block: Tensor, operator: Operator) -> None:
        self._reduce(library.ALL_REDUCE, block, operator, block)

    def reduce(self, block: Tensor, operator: Operator, root: int) -> None:
        whole = block if self._rank == root else block.detach().clone()  # only the root's tensor changes
        self._reduce(library.REDUCE, block, operator, whole, root)

    def reduce_scatter(self, block: Tensor, inputs: Blocks, operator: Operator) -> None:
        whole = torch.cat([flat(each) for each in ([inputs] if isinstance(inputs, Tensor) else inputs)])
        self._reduce(library.REDUCE_SCATTER, block, operator, whole)
        flat(block).copy_(whole.view(self._size, block.numel())[self._rank])

    def _reduce(self, op: int, block: Tensor, operator: Operator, whole: Tensor, root: int = -1) -> None:
        """Reduces ``whole`` on all ranks, in place. ``block`` is what a rank has of it in its signature."""
        code, _, count = numbers_of(block, operator, library.OPS[op])
        plan = reduction_plan.plan(operator, block.dtype, self._size)
        reduce, factor = operator
        signature = Signature(op=op, reduce=reduce, factor=factor, dtype=code, root=root, count=count)
        with self._agreement.collective(signature):
            self._reduce_everywhere(signature, real(flat(whole)), plan)

    def _reduce_everywhere(self, signature: Signature, block: Tensor, reduction: Reduction) -> None:
        wide = reduction_plan.widened(block, reduction)
        if wide is not None:
            self._reduce_everywhere(signature, wide, reduction)
            block.copy_(wide)
            return
        if block.nbytes > self._nodes.small_bytes:
            self._agreement.agree_all(signature)
            self._large.reduce(block, reduction)
            return
        self._local.reduce(block, reduction.within, 0)
        if self._nodes.is_leader:
            payloads = self._agreement.agree(signature, memory(block))
            if block.numel():
                block.copy_(reduction_plan.combine([read(data, block.dtype) for data in payloads], reduction.between))
                reduction_plan.divide(block, reduction.divisor)
        self._local.broadcast(block, 0)

    # ---- one block

    def broadcast(self, block: Tensor, root: int) -> None:
        signature = _signature(library.BROADCAST, block, root)
        with self._agreement.collective(signature):
            self._broadcast(signature, flat(block), self._nodes.node_of(root), self._nodes.local_rank_of(root))

    def _broadcast(self, signature: Signature, block: Tensor, origin: int, place: int) -> None:
        if block.nbytes > self._nodes.small_bytes:
            self._agreement.agree_all(signature)
            blocks = [block if node == origin else None for node in range(self._nodes.count)]
            self._large.spread(blocks, lambda piece: self._local.broadcast(piece, place))
            return
        is_here = origin == self._nodes.own_node
        if is_here:
            self._local.broadcast(block, place)
        if self._nodes.is_leader:
            payloads = self._agreement.agree(signature, memory(block) if is_here else b"")
            write(block, payloads[origin])
        self._local.broadcast(block, 0)  # also on the root's node, which learns by it that all nodes agree

    def barrier(self) -> None:
        signature = Signature(op=library.BARRIER, root=-1)
        with self._agreement.collective(signature):
            self._agreement.agree_all(signature)

    # ---- a block for each rank

    def all_gather(self, outputs: Blocks, block: Tensor) -> None:
        in_order = self._nodes.order == tuple(range(self._size))
        in_place = as_bytes(outputs) if in_order and isinstance(outputs, Tensor) else None
        whole = torch.empty(block.nbytes * self._size, dtype=torch.uint8) if in_place is None else in_place
        signature = _signature(library.ALL_GATHER, block)
        with self._agreement.collective(signature):
            rows = self._collect(signature, as_bytes(block), whole)
        if in_place is None:
            targets = (
                flat(outputs).chunk(self._size) if isinstance(outputs, Tensor) else [flat(each) for each in outputs]
            )
            for row, rank in zip(rows, self._nodes.order, strict=True):
                targets[rank].copy_(typed(row, block.dtype))

    def _collect(self, signature: Signature, mine: Tensor, whole: Tensor) -> Tensor:
        """Fills ``whole`` with the bytes of all ranks, a row for each, node by node."""
        count = mine.numel()
        regions = [whole[self._nodes.region(node, count)] for node in range(self._nodes.count)]
        self._local.all_gather(regions[self._nodes.own_node], mine)
        if whole.numel() > self._nodes.small_bytes:
            self._agreement.agree_all(signature)
            self._large.spread(regions)
            return whole.view(self._size, count)
        if self._nodes.is_leader:
            payloads = self._agreement.agree(signature, memory(regions[self._nodes.own_node]))
            for region, data in zip(regions, payloads, strict=True):
                write(region, data)
        self._local.broadcast(whole, 0)
        return whole.view(self._size, count)

    # ---- from rank to rank, by gloo

    def gather(self, outputs: Sequence[Tensor], block: Tensor, root: int) -> None:
        options = c10d.GatherOptions()
        options.rootRank, options.timeout = root, NEVER
        signature = _signature(library.GATHER, block, root)
        self._with_root(signature, block, outputs, lambda part, parts: self._gloo.gather(parts, [part], options))

    def scatter(self, block: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        options = c10d.ScatterOptions()
        options.rootRank, options.timeout = root, NEVER
        signature = _signature(library.SCATTER, block, root)
        self._with_root(signature, block, inputs, lambda part, parts: self._gloo.scatter([part], parts, options))

    def _with_root(
        self,
        signature: Signature,
        block: Tensor,
        blocks: Sequence[Tensor],
        start: Callable[[Tensor, list[list[Tensor]]], dist.Work],
    ) -> None:
        """Moves a block of each rank to or from ``blocks``, which only the root has, part by part."""
        own, all_ranks = as_bytes(block), [as_bytes(each) for each in blocks]
        with self._agreement.collective(signature):
            self._agreement.agree_all(signature)
            for part in _parts(own.numel()):
                self._wait(start(own[part], [[each[part] for each in all_ranks]] if all_ranks else []))

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        targets, sources = ([as_bytes(tensor) for tensor in tensors] for tensors in (outputs, inputs))
        signature = Signature(op=library.ALL_TO_ALL, dtype=code_of(outputs[0])[0], root=-1)
        sends, receives = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        options = c10d.AllToAllOptions()
        options.timeout = NEVER
        with self._agreement.collective(signature):
            largest = self._compare_splits(signature, sends, receives)
            for part in _parts(largest * outputs[0].itemsize):
                into, of = ([tensor[part] for tensor in tensors] for tensors in (targets, sources))
                splits = [[tensor.numel() for tensor in tensors] for tensors in (into, of)]
                received = torch.empty(sum(splits[0]), dtype=torch.uint8)
                self._wait(self._gloo.alltoall_base(received, torch.cat(of), *splits, options))
                for target, data in zip(into, received.split(splits[0]), strict=True):
                    target.copy_(data)

    def _compare_splits(self, signature: Signature, sends: list[int], receives: list[int]) -> int:
        """Checks on every rank that each pair of ranks sends and expects the same. Returns the largest count."""
        mine = as_bytes(torch.tensor([sends, receives]).flatten())
        rows = self._collect(signature, mine, torch.empty(mine.numel() * self._size, dtype=torch.uint8))
        tables = {rank: row.view(torch.int64).tolist() for rank, row in zip(self._nodes.order, rows, strict=True)}
        for sender in range(self._size):
            for receiver in range(self._size):
                sent, expected = tables[sender][receiver], tables[receiver][self._size + sender]
                if sent != expected:
                    raise failures.splits(self._agreement.names, sender, receiver, sent, expected)
        return max(map(max, tables.values()))

    def _wait(self, work: dist.Work) -> None:
        self._agreement.wait(work, [rank for rank in range(self._size) if rank != self._rank])


def _signature(op: int, block: Tensor, root: int = -1) -> Signature:
    return Signature(op=op, dtype=code_of(block)[0], root=root, count=block.numel())


def _parts(size: int) -> list[slice]:
    return [slice(start, start + _PART_BYTES) for start in range(0, size, _PART_BYTES)]
