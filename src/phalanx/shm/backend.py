"""The process group `shm`: torch.distributed's collectives, turned into calls of the native library.

What is not here (send, recv, sparse tensors, monitored_barrier) falls through to a gloo group inside.
"""

# torch names the parameters of these methods in one way in its stubs and calls them by position; its stubs also lack
# some attributes.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.errors import UsageError
from phalanx.shm import native
from phalanx.shm.failures import Names
from phalanx.shm.lane import Finished, Lane, original
from phalanx.shm.segment import Segment
from phalanx.shm.tensors import Staging, code_of, is_in_one_piece, numbers_of, reduce_of, same

_FINISHED = Finished()
_PATIENCE = 200
_Options = Any
"""torch's AllreduceOptions and its sisters: they have asyncOp, and what the collective needs."""


class ShmGroup(dist.ProcessGroup):
    """Ranks of one machine that share memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._names = Names(name, ranks, timeout.total_seconds())
        self._segment = Segment(dist.PrefixStore("shm", store), rank, size, timeout.total_seconds(), self._names)
        self._lane = Lane(name)
        self._timeout_ns = int(timeout.total_seconds() * 1e9)
        self._prepared: dict[tuple[torch.dtype, Any], native.Call] = {}
        self._add_gloo(dist.PrefixStore("gloo", store), timeout)
        _living.add(self)

    def _add_gloo(self, store: Any, timeout: timedelta) -> None:
        """Costs next to nothing until it is used: it connects two ranks when they first talk to each other."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        # All ranks are on this machine, whatever its name resolves to.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
        inner = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        inner._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, inner)
        self._set_default_backend(kind)

    # ---- one block

    def allreduce(self, tensors: list[Tensor], opts: _Options) -> dist.Work:
        if len(tensors) == 1 and not opts.asyncOp:
            # The common case, without what only the others need: a third of the call's time.
            tensor = tensors[0]
            call = self._prepared.get((tensor.dtype, opts.reduceOp.op))
            if call is not None and tensor.layout is torch.strided and is_in_one_piece(tensor):
                self._lane.now(self._all_reduce_prepared, call, tensor)
                return _FINISHED
        if tensors[0].layout is not torch.strided:
            return super().allreduce(tensors, opts)
        return self._go(opts, tensors, lambda: self._all_reduce(tensors, opts.reduceOp))

    allreduce_coalesced = allreduce

    def _all_reduce_prepared(self, call: native.Call, tensor: Tensor) -> None:
        call.count = tensor.numel()
        call.input = call.output = tensor.data_ptr()
        self._segment.run(call)

    def _all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> None:
        for tensor in tensors:
            staging = Staging()
            block = staging.update(tensor)
            self._reduce(native.ALL_REDUCE, block, op, input=block.data_ptr(), output=block.data_ptr())
            staging.finish()

    def reduce(self, tensors: list[Tensor], opts: _Options) -> dist.Work:
        def run() -> None:
            staging = Staging()
            (tensor,) = tensors
            block = staging.update(tensor)
            where = {"input": block.data_ptr(), "output": block.data_ptr()}
            self._reduce(native.REDUCE, block, opts.reduceOp, root=opts.rootRank, **where)
            if self._rank == opts.rootRank:
                staging.finish()

        return self._go(opts, tensors, run)

    def broadcast(self, tensors: list[Tensor], opts: _Options) -> dist.Work:
        def run() -> None:
            staging = Staging()
            (tensor,) = tensors
            block = staging.update(tensor)
            self._move(native.BROADCAST, block, root=opts.rootRank, input=block.data_ptr(), output=block.data_ptr())
            staging.finish()

        return self._go(opts, tensors, run)

    def barrier(self, opts: _Options = None) -> dist.Work:
        opts = opts if opts is not None else dist.BarrierOptions()
        return self._go(opts, [], lambda: self._run(native.Call(op=native.BARRIER, root=-1)))

    # ---- a block for each rank

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Options) -> dist.Work:
        def run() -> None:
            for each, tensor in zip(outputs, inputs, strict=True):
                self._check_blocks(each, tensor, "all_gather")
                staging = Staging()
                block = staging.read(tensor)
                blocks = [staging.write(output) for output in each]
                self._move(native.ALL_GATHER, block, input=block.data_ptr(), outputs=_pointers(blocks))
                staging.finish()

        return self._go(opts, [tensor for each in outputs for tensor in each], run)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Options) -> dist.Work:
        """``outputs`` has a list for each rank here, not one for each input."""
        by_input = [list(each) for each in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: _Options) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: _Options) -> dist.Work:
        def run() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._check_sizes(output, tensor, "all_gather")
                staging = Staging()
                block, blocks = staging.read(tensor), staging.write(output)
                self._move(native.ALL_GATHER, block, input=block.data_ptr(), output=blocks.data_ptr())
                staging.finish()

        return self._go(opts, outputs, run)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Options) -> dist.Work:
        def run() -> None:
            (tensor,) = inputs
            staging = Staging()
            block = staging.read(tensor)
            where: dict[str, Any] = {}
            if self._rank == opts.rootRank:
                self._check_blocks(outputs[0], tensor, "gather")
                where = {"outputs": _pointers([staging.write(output) for output in outputs[0]])}
            self._move(native.GATHER, block, root=opts.rootRank, input=block.data_ptr(), **where)
            staging.finish()

        return self._go(opts, outputs[0] if outputs else [], run)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _Options) -> dist.Work:
        def run() -> None:
            (tensor,) = outputs
            staging = Staging()
            block = staging.write(tensor)
            where: dict[str, Any] = {}
            if self._rank == opts.rootRank:
                self._check_blocks(inputs[0], tensor, "scatter")
                where = {"inputs": _pointers([staging.read(each) for each in inputs[0]])}
            self._move(native.SCATTER, block, root=opts.rootRank, output=block.data_ptr(), **where)
            staging.finish()

        return self._go(opts, outputs, run)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _Options) -> dist.Work:
        def run() -> None:
            for output, each in zip(outputs, inputs, strict=True):
                self._check_blocks(each, output, "reduce_scatter")
                staging = Staging()
                block = staging.write(output)
                blocks = [staging.read(source) for source in each]
                where = {"inputs": _pointers(blocks), "output": block.data_ptr()}
                self._reduce(native.REDUCE_SCATTER, block, opts.reduceOp, **where)
                staging.finish()

        return self._go(opts, outputs, run)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: _Options) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: _Options) -> dist.Work:
        def run() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._check_sizes(tensor, output, "reduce_scatter")
                staging = Staging()
                block, blocks = staging.write(output), staging.read(tensor)
                where = {"input": blocks.data_ptr(), "output": block.data_ptr()}
                self._reduce(native.REDUCE_SCATTER, block, opts.reduceOp, **where)
                staging.finish()

        return self._go(opts, outputs, run)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: _Options) -> dist.Work:
        def run() -> None:
            staging = Staging()
            sources = [staging.read(tensor) for tensor in inputs]
            targets = [staging.write(tensor) for tensor in outputs]
            self._exchange(sources, targets)
            staging.finish()

        return self._go(opts, outputs, run)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: _Options
    ) -> dist.Work:
        def run() -> None:
            staging = Staging()
            source, target = staging.read(input), staging.write(output)
            self._exchange(_split(source, input_splits, self._size), _split(target, output_splits, self._size))
            staging.finish()

        return self._go(opts, [output], run)

    def _exchange(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        if len(sources) != self._size or len(targets) != self._size:
            raise UsageError(f"all_to_all got {len(sources)} inputs and {len(targets)} outputs for {self._size} ranks.")
        code, width = code_of(sources[0])
        counts = ctypes.c_uint64 * self._size
        call = native.Call(
            op=native.ALL_TO_ALL,
            dtype=code,
            width=width,
            root=-1,
            inputs=_pointers(sources),
            outputs=_pointers(targets),
            sends=counts(*[tensor.numel() for tensor in sources]),
            receives=counts(*[tensor.numel() for tensor in targets]),
        )
        self._run(call)

    # ---- what they have in common

    def _go(self, opts: _Options, result: Sequence[Tensor], run: Callable[[], None]) -> dist.Work:
        if opts.asyncOp:
            return self._lane.later(run, list(result))
        self._lane.now(run)
        return _FINISHED

    def _reduce(self, op: int, block: Tensor, reduce_op: ReduceOp, root: int = -1, **where: Any) -> None:
        reduce, factor = reduce_of(reduce_op)
        code, width, count = numbers_of(block, reduce, native.OPS[op])
        call = native.Call(op=op, reduce=reduce, factor=factor, dtype=code, width=width, count=count, root=root)
        for name, value in where.items():
            setattr(call, name, value)
        self._run(call)
        if op == native.ALL_REDUCE and not factor and not block.is_complex():
            self._prepared[block.dtype, reduce_op.op] = call

    def _move(self, op: int, block: Tensor, root: int = -1, **where: Any) -> None:
        code, width = code_of(block)
        self._run(native.Call(op=op, dtype=code, width=width, count=block.numel(), root=root, **where))

    def _run(self, call: native.Call) -> None:
        call.timeout_ns = self._timeout_ns
        call.patience = _PATIENCE
        self._segment.run(call)

    def _check_blocks(self, blocks: Sequence[Tensor], like: Tensor, name: str) -> None:
        if len(blocks) != self._size:
            raise UsageError(f"{name} got {len(blocks)} tensors for {self._size} ranks; give one for each.")
        same(blocks, like, name)

    def _check_sizes(self, large: Tensor, small: Tensor, name: str) -> None:
        if large.numel() != small.numel() * self._size or large.dtype != small.dtype:
            raise UsageError(
                f"{name} got {large.dtype} of {large.numel()} elements beside {small.dtype} of {small.numel()}; "
                f"the first needs {self._size} times the second, and the same type."
            )

    # ---- life

    def getBackendName(self) -> str:
        return "shm"

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._names.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_ns = int(timeout.total_seconds() * 1e9)
        self._names.timeout = timeout.total_seconds()
        self._prepared.clear()

    def shutdown(self) -> None:
        """Leaves the group, when what was asked for is done."""
        if not self._lane.closed:
            self._lane.close("the process group has been shut down.")
            self._segment.close()
            super().shutdown()

    def abort(self) -> None:
        """Ends every wait of every rank in this group at once."""
        if not self._lane.closed:
            self._segment.abort()
            self.shutdown()

    def _forked(self) -> None:
        self._lane = Lane(self._names.group)
        self._lane.closed = "this process was forked from a rank and has no place in the group; start it afresh."

    # The names that torch before 2.13 calls.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _keep_compilers_out() -> None:
    """torch.compile traces whatever Python runs below a compiled model, and DDP's broadcast of buffers comes here.

    torch.compiler.disable would say the same and import all of the compiler for it.
    """
    from torch._C._dynamo import eval_frame

    skip = getattr(eval_frame, "skip_code", None)  # torch before 2.7
    if skip is None:
        action = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(action, action)  # of the function and of all that it calls

        def skip(code: CodeType) -> None:
            eval_frame.set_code_exec_strategy(code, strategy)

    for member in vars(ShmGroup).values():
        if isinstance(member, FunctionType):
            skip(member.__code__)


def _raise_from_backward(plain: Callable[..., None]) -> Callable[..., None]:
    """DDP's C++ turns whatever a collective raises into a RuntimeError; a lost peer should be a PeerLost here too."""

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        try:
            plain(*args, **kwargs)
        except RuntimeError as error:
            ours = original(error)
            if ours is None:
                raise
            raise ours from error

    return backward


_keep_compilers_out()
torch.autograd.backward = _raise_from_backward(torch.autograd.backward)
_living: weakref.WeakSet[ShmGroup] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [group._forked() for group in _living])


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def _split(tensor: Tensor, sizes: Sequence[int], ranks: int) -> Sequence[Tensor]:
    """The blocks of a tensor in one piece; without sizes, equal ones."""
    if not sizes:
        if tensor.dim() and tensor.size(0) % ranks:
            raise UsageError(f"all_to_all_single got {tensor.size(0)} rows for {ranks} ranks; give split sizes.")
        return tensor.view(-1).chunk(ranks) if tensor.numel() else [tensor] * ranks
    return tensor.split(list(sizes))
