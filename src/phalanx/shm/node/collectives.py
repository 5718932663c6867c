"""The collectives of the ranks of one node, in shared memory. Each blocks until it is done.

They take contiguous tensors that fit together; `StagedCollectives` sees to that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from phalanx.native import library
from phalanx.shm.node.segment import YIELD_MICROSECONDS, Segment
from phalanx.shm.node.tensors import REDUCE_NAMES, Blocks, Operator, code_of, numbers_of


class NodeCollectives:
    """The collectives of one group. Its caller runs one at a time."""

    def __init__(self, segment: Segment, timeout: float) -> None:
        self.segment = segment
        self.prepared: dict[tuple[torch.dtype, int], Callable[[Tensor], None]] = {}
        """The last all_reduce of each type and operator, to be run again on another tensor."""
        self.set_timeout(timeout)

    def set_timeout(self, seconds: float) -> None:
        self._timeout_ns = library.nanoseconds(seconds)
        self.prepared.clear()

    def abort(self) -> None:
        self.segment.abort()

    def close(self) -> None:
        self.segment.close()

    def forked(self) -> None:
        """Called in a child that this process has forked: there is nothing to give back."""

    # ---- one block

    def all_reduce(self, block: Tensor, operator: Operator) -> None:
        call = self._reduce(library.ALL_REDUCE, block, operator, block)
        if REDUCE_NAMES[operator.code] != "premul_sum" and not block.is_complex():  # each call has its own factor
            self.prepared[block.dtype, operator.code] = functools.partial(self._repeat, call)

    def _repeat(self, call: library.Call, tensor: Tensor) -> None:
        call.count = tensor.numel()
        call.input = call.output = tensor.data_ptr()
        self.segment.run(call)

    def reduce(self, block: Tensor, operator: Operator, root: int) -> None:
        self._reduce(library.REDUCE, block, operator, block, root)

    def broadcast(self, block: Tensor, root: int) -> None:
        self._move(library.BROADCAST, block, block, block, root)

    def barrier(self) -> None:
        self._run(library.Call(op=library.BARRIER, root=-1))

    # ---- a block for each rank

    def all_gather(self, outputs: Blocks, block: Tensor) -> None:
        self._move(library.ALL_GATHER, block, block, outputs)

    def gather(self, outputs: Sequence[Tensor], block: Tensor, root: int) -> None:
        self._move(library.GATHER, block, block, outputs, root)

    def scatter(self, block: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        self._move(library.SCATTER, block, inputs, block, root)

    def reduce_scatter(self, block: Tensor, inputs: Blocks, operator: Operator) -> None:
        self._reduce(library.REDUCE_SCATTER, block, operator, inputs)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        code, width = code_of(inputs[0])
        counts = ctypes.c_uint64 * len(inputs)
        call = library.Call(
            op=library.ALL_TO_ALL,
            dtype=code,
            width=width,
            root=-1,
            sends=counts(*[tensor.numel() for tensor in inputs]),
            receives=counts(*[tensor.numel() for tensor in outputs]),
            **_addresses("input", inputs),
            **_addresses("output", outputs),
        )
        self._run(call)

    # ---- running

    def _reduce(self, op: int, block: Tensor, operator: Operator, inputs: Blocks, root: int = -1) -> library.Call:
        code, width, count = numbers_of(block, operator, library.OPS[op])
        call = library.Call(
            op=op,
            reduce=operator.code,
            factor=operator.factor,
            dtype=code,
            width=width,
            count=count,
            root=root,
            output=block.data_ptr(),
            **_addresses("input", inputs),
        )
        self._run(call)
        return call

    def _move(self, op: int, block: Tensor, inputs: Blocks, outputs: Blocks, root: int = -1) -> None:
        code, width = code_of(block)
        memory = _addresses("input", inputs) | _addresses("output", outputs)
        self._run(library.Call(op=op, dtype=code, width=width, count=block.numel(), root=root, **memory))

    def _run(self, call: library.Call) -> None:
        call.timeout_ns = self._timeout_ns
        call.yield_microseconds = YIELD_MICROSECONDS
        self.segment.run(call)


def _addresses(name: Literal["input", "output"], blocks: Blocks) -> dict[str, object]:
    """Returns the field of a call that has the addresses: ``input`` for one tensor, ``inputs`` for a list."""
    if isinstance(blocks, Tensor):
        return {name: blocks.data_ptr()}
    if not blocks:  # gather and scatter, on all ranks but the root
        return {}
    return {f"{name}s": (ctypes.c_void_p * len(blocks))(*[block.data_ptr() for block in blocks])}
