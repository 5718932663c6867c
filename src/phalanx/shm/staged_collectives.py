"""The collectives of a group for tensors of any layout: checked here, and staged in contiguous buffers where needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.shm.node.collectives import NodeCollectives
from phalanx.shm.node.tensors import Blocks, Staging, check_blocks, check_exchange, contiguous, operator_of, split

if TYPE_CHECKING:
    from phalanx.shm.hierarchical.collectives import HierarchicalCollectives


class StagedCollectives:
    """Collectives that block until they are done. The ones that move the data get contiguous tensors only."""

    def __init__(self, inner: NodeCollectives | HierarchicalCollectives, rank: int, size: int) -> None:
        self._inner, self._rank, self._size = inner, rank, size

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        staging = Staging()
        self._inner.all_reduce(staging.update(tensor), operator_of(op))
        staging.finish()

    def reduce(self, tensor: Tensor, op: ReduceOp, root: int) -> None:
        staging = Staging()
        block = staging.update(tensor) if self._rank == root else contiguous(tensor)
        self._inner.reduce(block, operator_of(op), root)
        staging.finish()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        staging = Staging()
        self._inner.broadcast(contiguous(tensor) if self._rank == root else staging.write(tensor), root)
        staging.finish()

    def barrier(self) -> None:
        self._inner.barrier()

    def all_gather(self, outputs: Blocks, tensor: Tensor) -> None:
        check_blocks(outputs, tensor, self._size, "all_gather")
        staging = Staging()
        written = staging.write(outputs) if isinstance(outputs, Tensor) else [staging.write(each) for each in outputs]
        self._inner.all_gather(written, contiguous(tensor))
        staging.finish()

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        if self._rank == root:
            check_blocks(outputs, tensor, self._size, "gather")
        staging = Staging()
        written = [staging.write(output) for output in outputs] if self._rank == root else []
        self._inner.gather(written, contiguous(tensor), root)
        staging.finish()

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        if self._rank == root:
            check_blocks(inputs, output, self._size, "scatter")
        staging = Staging()
        given = [contiguous(tensor) for tensor in inputs] if self._rank == root else []
        self._inner.scatter(staging.write(output), given, root)
        staging.finish()

    def reduce_scatter(self, output: Tensor, inputs: Blocks, op: ReduceOp) -> None:
        check_blocks(inputs, output, self._size, "reduce_scatter")
        staging = Staging()
        given = contiguous(inputs) if isinstance(inputs, Tensor) else [contiguous(tensor) for tensor in inputs]
        self._inner.reduce_scatter(staging.write(output), given, operator_of(op))
        staging.finish()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        check_exchange(outputs, inputs, self._size)
        staging = Staging()
        self._inner.all_to_all([staging.write(tensor) for tensor in outputs], [contiguous(tensor) for tensor in inputs])
        staging.finish()

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None:
        staging = Staging()
        outputs = split(staging.write(output).detach(), output_splits, self._size)
        inputs = split(contiguous(tensor).detach(), input_splits, self._size)
        check_exchange(outputs, inputs, self._size)
        self._inner.all_to_all(outputs, inputs)
        staging.finish()


def run_all(run: Callable[..., None], calls: Iterable[tuple[object, ...]]) -> None:
    for arguments in calls:
        run(*arguments)
