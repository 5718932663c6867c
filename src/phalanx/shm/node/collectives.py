"""The collectives of a group as plain functions of tensors: each blocks until it is done, and runs in shared memory.

This is what a group of one node is made of. `AcrossNodes` has the same methods for several, and uses these within each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.native import library
from phalanx.shm.node.segment import PATIENCE, Segment
from phalanx.shm.node.tensors import (
    REDUCE_NAMES,
    Staging,
    check_blocks,
    check_exchange,
    code_of,
    numbers_of,
    reduce_of,
    split,
)

_Where = dict[str, Any]


class Collectives:
    """One at a time: whoever calls sees to that."""

    def __init__(self, segment: Segment, rank: int, size: int, timeout: float) -> None:
        self._segment = segment
        self._rank, self._size = rank, size
        self.prepared: dict[tuple[torch.dtype, int], library.Call] = {}
        """The call that all_reduce made the last time for a type and an operator; `repeat` spares the making."""
        self.set_timeout(timeout)

    def set_timeout(self, seconds: float) -> None:
        self._timeout = seconds
        self.prepared.clear()

    def within(self, seconds: float, run: Callable[[], None]) -> None:
        """Runs it with a timeout of its own."""
        usual = self._timeout
        self.set_timeout(seconds)
        try:
            run()
        finally:
            self.set_timeout(usual)  # also for the calls that were prepared meanwhile

    def keep(self, log: library.Log | None) -> None:
        self._segment.keep(log)

    def abort(self) -> None:
        self._segment.abort()

    def close(self) -> None:
        self._segment.close()

    def forked(self) -> None:
        """In a child that this process has forked: there is nothing to give back."""

    # ---- one block

    def repeat(self, call: library.Call, tensor: Tensor) -> None:
        call.count = tensor.numel()
        call.input = call.output = tensor.data_ptr()
        self._segment.run(call)

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        staging = Staging()
        block = staging.update(tensor)
        call = self._reduction(library.ALL_REDUCE, block, op, {"input": block.data_ptr(), "output": block.data_ptr()})
        self._run(call)
        staging.finish()
        if REDUCE_NAMES[call.reduce] != "premul_sum" and not tensor.is_complex():  # a factor is that call's own
            self.prepared[tensor.dtype, op.op.value] = call

    def reduce(self, tensor: Tensor, op: Any, root: int) -> None:
        staging = Staging()
        block = staging.update(tensor) if self._rank == root else staging.read(tensor)
        where = {"input": block.data_ptr(), "output": block.data_ptr()}
        self._run(self._reduction(library.REDUCE, block, op, where, root))
        staging.finish()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        staging = Staging()
        block = staging.read(tensor) if self._rank == root else staging.write(tensor)
        self._move(library.BROADCAST, block, {"input": block.data_ptr(), "output": block.data_ptr()}, root)
        staging.finish()

    def barrier(self) -> None:
        self._run(library.Call(op=library.BARRIER, root=-1))

    # ---- a block for each rank: in tensors of their own, or one after the other in one

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor) -> None:
        check_blocks(outputs, tensor, self._size, "all_gather")
        staging = Staging()
        block = staging.read(tensor)
        where: _Where = {"input": block.data_ptr()}
        if isinstance(outputs, Tensor):
            where["output"] = staging.write(outputs).data_ptr()
        else:
            where["outputs"] = _pointers([staging.write(output) for output in outputs])
        self._move(library.ALL_GATHER, block, where)
        staging.finish()

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        staging = Staging()
        block = staging.read(tensor)
        where: _Where = {"input": block.data_ptr()}
        if self._rank == root:
            check_blocks(outputs, tensor, self._size, "gather")
            where["outputs"] = _pointers([staging.write(output) for output in outputs])
        self._move(library.GATHER, block, where, root)
        staging.finish()

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        staging = Staging()
        block = staging.write(output)
        where: _Where = {"output": block.data_ptr()}
        if self._rank == root:
            check_blocks(inputs, output, self._size, "scatter")
            where["inputs"] = _pointers([staging.read(tensor) for tensor in inputs])
        self._move(library.SCATTER, block, where, root)
        staging.finish()

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor] | Tensor, op: Any) -> None:
        check_blocks(inputs, output, self._size, "reduce_scatter")
        staging = Staging()
        block = staging.write(output)
        where: _Where = {"output": block.data_ptr()}
        if isinstance(inputs, Tensor):
            where["input"] = staging.read(inputs).data_ptr()
        else:
            where["inputs"] = _pointers([staging.read(tensor) for tensor in inputs])
        self._run(self._reduction(library.REDUCE_SCATTER, block, op, where))
        staging.finish()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        check_exchange(outputs, inputs, self._size)
        staging = Staging()
        sources = [staging.read(tensor) for tensor in inputs]
        targets = [staging.write(tensor) for tensor in outputs]
        code, width = code_of(sources[0])
        counts = ctypes.c_uint64 * self._size
        call = library.Call(
            op=library.ALL_TO_ALL,
            dtype=code,
            width=width,
            root=-1,
            inputs=_pointers(sources),
            outputs=_pointers(targets),
            sends=counts(*[tensor.numel() for tensor in sources]),
            receives=counts(*[tensor.numel() for tensor in targets]),
        )
        self._run(call)
        staging.finish()

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None:
        staging = Staging()
        source, target = staging.read(tensor), staging.write(output)
        self.all_to_all(split(target, output_splits, self._size), split(source, input_splits, self._size))
        staging.finish()

    # ---- what they have in common

    def _reduction(self, op: int, block: Tensor, reduce_op: Any, where: _Where, root: int = -1) -> library.Call:
        reduce, factor = reduce_of(reduce_op)
        code, width, count = numbers_of(block, reduce, library.OPS[op])
        return library.Call(
            op=op, reduce=reduce, factor=factor, dtype=code, width=width, count=count, root=root, **where
        )

    def _move(self, op: int, block: Tensor, where: _Where, root: int = -1) -> None:
        code, width = code_of(block)
        self._run(library.Call(op=op, dtype=code, width=width, count=block.numel(), root=root, **where))

    def _run(self, call: library.Call) -> None:
        call.timeout_ns = library.nanoseconds(self._timeout)
        call.patience = PATIENCE
        self._segment.run(call)


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
