"""The collectives of a group whose ranks are on several nodes: the same methods as `Collectives` has for one.

Small blocks are added up in the memory of each node, sent by its leader to the other leaders, and spread in memory. For
large ones every rank of a node adds up a part and has a gloo group of its own, a rail, with the ranks at the same place
on the other nodes: the network carries every byte once for each node, not once for each rank. What is rare goes
from rank to rank by gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from phalanx.native import library
from phalanx.native.library import Signature
from phalanx.shm.hierarchical import reduction_plan
from phalanx.shm.hierarchical.agreement import Agreement
from phalanx.shm.hierarchical.flat_tensors import as_bytes, flat, memory, read, real, size_of, typed, write
from phalanx.shm.hierarchical.gloo_groups import NEVER
from phalanx.shm.hierarchical.pipeline import Pipeline
from phalanx.shm.hierarchical.reduction_plan import Reduction
from phalanx.shm.hierarchical.topology import Topology
from phalanx.shm.node import failures
from phalanx.shm.node.failures import Names
from phalanx.shm.node.tensors import Staging, check_blocks, check_exchange, code_of, numbers_of, reduce_of, split
from phalanx.store.join import Claim

_PART_BYTES = 1 << 20


class AcrossNodes:
    """One at a time: whoever calls sees to that."""

    def __init__(
        self,
        store: Any,
        nodes: Topology,
        claims: Sequence[Claim],
        timeout: timedelta,
        names: Names,
        address: str,
        gloo: Any,
    ) -> None:
        """``gloo`` is a group of all ranks."""
        self._nodes, self._names, self._gloo = nodes, names, gloo
        self._rank, self._size = nodes.rank, len(claims)
        self._agreement = agreement = Agreement(store, nodes, claims, timeout, names, address, gloo)
        self._local, self._large = agreement.local, Pipeline(agreement)
        self.prepared: dict[Any, library.Call] = {}
        """Always empty: beside the network the making of a call is nothing."""
        self.set_timeout, self.within = agreement.set_timeout, agreement.within
        self.abort, self.close, self.forked = agreement.abort, agreement.close, agreement.forked

    def repeat(self, call: library.Call, tensor: Tensor) -> None:
        raise AssertionError("nothing is prepared")

    # ---- reductions

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        staging = Staging()
        block = flat(staging.update(tensor))
        signature, reduction = self._reduction(library.ALL_REDUCE, block, op)
        with self._agreement.collective(signature):
            self._reduce_everywhere(signature, real(block), reduction)
        staging.finish()

    def reduce(self, tensor: Tensor, op: Any, root: int) -> None:
        staging = Staging()
        # Only the root's tensor changes.
        block = flat(staging.update(tensor)) if self._rank == root else flat(tensor).clone()
        signature, reduction = self._reduction(library.REDUCE, block, op, root)
        with self._agreement.collective(signature):
            self._reduce_everywhere(signature, real(block), reduction)
        staging.finish()

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor] | Tensor, op: Any) -> None:
        check_blocks(inputs, output, self._size, "reduce_scatter")
        staging = Staging()
        target = flat(staging.write(output))
        whole = torch.cat([flat(tensor) for tensor in ([inputs] if isinstance(inputs, Tensor) else inputs)])
        signature, reduction = self._reduction(library.REDUCE_SCATTER, whole[: output.numel()], op)
        with self._agreement.collective(signature):
            self._reduce_everywhere(signature, real(whole), reduction)
        target.copy_(whole.view(self._size, output.numel())[self._rank])
        staging.finish()

    def _reduction(self, op: int, block: Tensor, reduce_op: Any, root: int = -1) -> tuple[Signature, Reduction]:
        reduce, factor = reduce_of(reduce_op)
        code, _, count = numbers_of(block, reduce, library.OPS[op])
        signature = Signature(op=op, reduce=reduce, factor=factor, dtype=code, root=root, count=count)
        return signature, reduction_plan.plan(reduce, factor, block.dtype, self._size)

    def _reduce_everywhere(self, signature: Signature, block: Tensor, reduction: Reduction) -> None:
        wide = reduction_plan.widened(block, reduction)
        if wide is not None:
            self._reduce_everywhere(signature, wide, reduction)
            block.copy_(wide)
            return
        if size_of(block) > self._nodes.small_bytes:
            self._agreement.agree_all(signature)
            self._large.reduce(block, reduction)
            return
        self._local.reduce(block, reduction.within, 0)
        if self._nodes.is_leader:
            brought = self._agreement.agree(signature, memory(block))
            if block.numel():
                block.copy_(reduction_plan.combine([read(data, block.dtype) for data in brought], reduction.between))
                reduction_plan.divide(block, reduction.divisor)
        self._local.broadcast(block, 0)

    # ---- one block

    def broadcast(self, tensor: Tensor, root: int) -> None:
        staging = Staging()
        block = flat(staging.read(tensor) if self._rank == root else staging.write(tensor))
        signature = Signature(op=library.BROADCAST, dtype=code_of(block)[0], root=root, count=block.numel())
        with self._agreement.collective(signature):
            self._broadcast(signature, block, self._nodes.node_of(root), self._nodes.place_of(root))
        staging.finish()

    def _broadcast(self, signature: Signature, block: Tensor, origin: int, place: int) -> None:
        if size_of(block) > self._nodes.small_bytes:
            self._agreement.agree_all(signature)
            blocks = [block if node == origin else None for node in range(self._nodes.count)]
            self._large.spread(blocks, lambda piece: self._local.broadcast(piece, place))
            return
        is_here = origin == self._nodes.here
        if is_here:
            self._local.broadcast(block, place)
        if self._nodes.is_leader:
            brought = self._agreement.agree(signature, memory(block) if is_here else b"")
            write(block, brought[origin])
        self._local.broadcast(block, 0)  # on the root's node, too: it is the word that all agree

    def barrier(self) -> None:
        signature = Signature(op=library.BARRIER, root=-1)
        with self._agreement.collective(signature):
            self._agreement.agree_all(signature)

    # ---- a block for each rank

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor) -> None:
        check_blocks(outputs, tensor, self._size, "all_gather")
        staging = Staging()
        block = flat(tensor)
        targets = [flat(staging.write(each)) for each in ([outputs] if isinstance(outputs, Tensor) else outputs)]
        in_place = len(targets) == 1 and self._nodes.order == tuple(range(self._size))
        whole = as_bytes(targets[0]) if in_place else torch.empty(size_of(block) * self._size, dtype=torch.uint8)
        signature = Signature(op=library.ALL_GATHER, dtype=code_of(block)[0], root=-1, count=block.numel())
        with self._agreement.collective(signature):
            rows = self._collect(signature, as_bytes(block), whole)
        if not in_place:
            blocks = targets[0].chunk(self._size) if isinstance(outputs, Tensor) else targets
            for row, rank in zip(rows, self._nodes.order, strict=True):
                blocks[rank].copy_(typed(row, tensor.dtype))
        staging.finish()

    def _collect(self, signature: Signature, mine: Tensor, whole: Tensor) -> Tensor:
        """The bytes of all ranks in ``whole``, a row for each, node by node."""
        count = mine.numel()
        regions = [whole[self._nodes.region(node, count)] for node in range(self._nodes.count)]
        self._local.all_gather(regions[self._nodes.here], mine)
        if whole.numel() > self._nodes.small_bytes:
            self._agreement.agree_all(signature)
            self._large.spread(regions)
            return whole.view(self._size, count)
        if self._nodes.is_leader:
            brought = self._agreement.agree(signature, memory(regions[self._nodes.here]))
            for region, data in zip(regions, brought, strict=True):
                write(region, data)
        self._local.broadcast(whole, 0)
        return whole.view(self._size, count)

    # ---- from rank to rank

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        staging = Staging()
        block, targets = flat(tensor), []
        if self._rank == root:
            check_blocks(outputs, tensor, self._size, "gather")
            targets = [[as_bytes(flat(staging.write(output))) for output in outputs]]
        options = c10d.GatherOptions()
        options.rootRank, options.timeout = root, NEVER
        signature = Signature(op=library.GATHER, dtype=code_of(block)[0], root=root, count=block.numel())
        with self._agreement.collective(signature):
            self._agreement.agree_all(signature)
            for part in _parts(size_of(block)):
                into = [[target[part] for target in blocks] for blocks in targets]
                self._wait(self._gloo.gather(into, [as_bytes(block)[part]], options))
        staging.finish()

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        staging = Staging()
        block, sources = flat(staging.write(output)), []
        if self._rank == root:
            check_blocks(inputs, output, self._size, "scatter")
            sources = [[as_bytes(flat(tensor)) for tensor in inputs]]
        options = c10d.ScatterOptions()
        options.rootRank, options.timeout = root, NEVER
        signature = Signature(op=library.SCATTER, dtype=code_of(block)[0], root=root, count=block.numel())
        with self._agreement.collective(signature):
            self._agreement.agree_all(signature)
            for part in _parts(size_of(block)):
                of = [[source[part] for source in blocks] for blocks in sources]
                self._wait(self._gloo.scatter([as_bytes(block)[part]], of, options))
        staging.finish()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        check_exchange(outputs, inputs, self._size)
        staging = Staging()
        targets = [as_bytes(flat(staging.write(tensor))) for tensor in outputs]
        sources = [as_bytes(flat(tensor)) for tensor in inputs]
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
        staging.finish()

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None:
        staging = Staging()
        source, target = staging.read(tensor).detach(), staging.write(output).detach()
        self.all_to_all(split(target, output_splits, self._size), split(source, input_splits, self._size))
        staging.finish()

    def _compare_splits(self, signature: Signature, sends: list[int], receives: list[int]) -> int:
        """What a rank sends must be what is expected from it; everybody looks at all pairs. The largest of them."""
        mine = as_bytes(torch.tensor([sends, receives]).flatten())
        rows = self._collect(signature, mine, torch.empty(mine.numel() * self._size, dtype=torch.uint8))
        tables = {rank: row.view(torch.int64).tolist() for rank, row in zip(self._nodes.order, rows, strict=True)}
        for sender in range(self._size):
            for receiver in range(self._size):
                sent, expected = tables[sender][receiver], tables[receiver][self._size + sender]
                if sent != expected:
                    raise failures.splits(self._names, sender, receiver, sent, expected)
        return max(map(max, tables.values()))

    def _wait(self, work: Any) -> None:
        self._agreement.wait(work, [rank for rank in range(self._size) if rank != self._rank])


def _parts(size: int) -> list[slice]:
    """What goes from one rank to another at a time: gloo does not say how far it is, and a timeout counts while
    nothing moves."""
    return [slice(start, start + _PART_BYTES) for start in range(0, size, _PART_BYTES)]
