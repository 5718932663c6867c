"""The process group `shm`: what torch.distributed calls, handed to `Collectives` or `AcrossNodes` in the right order.

send and recv go by `Messages` within a node; sparse tensors, which are rare, by a gloo group inside.
"""

# torch names the parameters of these methods in one way in its stubs and calls them by position.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from phalanx import status
from phalanx.shm import monitored_barrier
from phalanx.shm.hierarchical import gloo_groups
from phalanx.shm.hierarchical.topology import sort_into_nodes
from phalanx.shm.node.call_options import UNSET, Options, options_of
from phalanx.shm.node.collectives import Collectives
from phalanx.shm.node.failures import Names
from phalanx.shm.node.p2p import Messages
from phalanx.shm.node.segment import Segment
from phalanx.shm.node.status_log import StatusLog
from phalanx.shm.node.tensors import is_in_one_piece
from phalanx.shm.node.work_queue import Finished, WorkQueue
from phalanx.status import layout
from phalanx.status.layout import ALL_REDUCE
from phalanx.store import join
from phalanx.store.tcp_store import part_for_each_use
from phalanx.torch_compat.c10d import add_default_backend
from phalanx.torch_compat.gloo import new_group

if TYPE_CHECKING:
    from phalanx.shm.hierarchical.collectives_across import AcrossNodes

_FINISHED = Finished()


class ShmGroup(dist.ProcessGroup):
    """Ranks that share memory on each node, and gloo between nodes if they are on several."""

    substitutes_gloo = False
    """The script has asked for gloo, or for nothing; it is answered as gloo would."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, size)
        seconds = timeout.total_seconds()
        # torch may give two groups without a common rank the same name, and so the same store.
        store = dist.PrefixStore(",".join(map(str, ranks)), store)
        # The same holds for a group that is made again after it was destroyed, when the launcher has the store.
        store = part_for_each_use(store, rank)
        self._names = Names(name, ranks, seconds)
        self._book = StatusLog("0" if name == "world" else name, ranks)
        messages = Messages(rank, self._names, self._book)
        shared = dist.PrefixStore("shm", store)
        claims = join.sign_in(shared, rank, size, seconds, note=messages.address)
        self._names.pids = tuple(claim.pid for claim in claims)
        nodes = sort_into_nodes([claim.machine for claim in claims], rank)
        address = (
            gloo_groups.LOOPBACK
            if nodes.count == 1
            else gloo_groups.own_address(store, [claim.host for claim in claims])
        )
        self._add_gloo(dist.PrefixStore("gloo", store), rank, size, timeout, address)
        self._log = None
        if nodes.count == 1:
            segment = Segment(shared, claims, rank, seconds, self._names)
            messages.meet([claim.note for claim in claims], segment.pidfds)
            self._messages: Messages | gloo_groups.GlooMessages = messages
            self._collectives: Collectives | AcrossNodes = Collectives(segment, rank, size, seconds)
            self._log = self._book.for_the_library()
            segment.keep(self._log)
        else:
            from phalanx.shm.hierarchical.collectives_across import AcrossNodes

            messages.close("the group is on several nodes.")
            self._messages = gloo_groups.GlooMessages(self._gloo, self._names, self._book)
            self._collectives = AcrossNodes(shared, nodes, claims, timeout, self._names, address, self._gloo)
        self._work_queue = WorkQueue(name, self._book.page, self._log)
        self._store, self._monitored = store, itertools.count()
        _living.add(self)

    def _add_gloo(self, store: dist.Store, rank: int, size: int, timeout: timedelta, address: str) -> None:
        inner = new_group(store, rank, size, timeout, address, lazy=True)
        # Called directly: by way of super() torch holds the interpreter's lock, which gloo's own thread may want.
        self._gloo = inner
        add_default_backend(self, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, inner)

    def _go(
        self, op: int, tensor: Tensor | None, opts: Options, result: Sequence[Tensor], run: Callable[[], None]
    ) -> dist.Work:
        kind = self._book[op, None if tensor is None else tensor.dtype]
        size = 0 if tensor is None else tensor.numel()
        if opts.timeout != UNSET:
            run = functools.partial(self._collectives.within, opts.timeout.total_seconds(), run)
        if opts.asyncOp:
            return self._work_queue.later(kind, size, run, list(result))
        self._work_queue.now(kind, size, run)
        return _FINISHED

    # ---- one block

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Options = None) -> dist.Work:
        tensors = [tensors] if not isinstance(tensors, list) else tensors
        opts = options_of(opts, c10d.AllreduceOptions)
        tensor = tensors[0]
        if tensor.layout is not torch.strided:
            return self._gloo.allreduce(tensors, opts)
        if len(tensors) == 1 and not opts.asyncOp:
            # The common case, without what only the others need: that is more than half of the call's time.
            call = self._collectives.prepared.get((tensor.dtype, opts.reduceOp.op.value))
            if call is not None and opts.timeout == UNSET and is_in_one_piece(tensor):
                kind, size = self._book[ALL_REDUCE, tensor.dtype], tensor.numel()
                self._work_queue.now(kind, size, self._collectives.repeat, call, tensor)
                return _FINISHED

        def run() -> None:
            for tensor in tensors:
                self._collectives.all_reduce(tensor, opts.reduceOp)

        return self._go(ALL_REDUCE, tensor, opts, tensors, run)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Options = None) -> dist.Work:
        opts = options_of(opts, c10d.ReduceOptions)
        (tensor,) = tensors
        run = functools.partial(self._collectives.reduce, tensor, opts.reduceOp, opts.rootRank)
        return self._go(layout.REDUCE, tensor, opts, tensors, run)

    def broadcast(self, tensors: list[Tensor], opts: Options = None) -> dist.Work:
        opts = options_of(opts, c10d.BroadcastOptions)
        (tensor,) = tensors
        return self._go(
            layout.BROADCAST, tensor, opts, tensors, lambda: self._collectives.broadcast(tensor, opts.rootRank)
        )

    def barrier(self, opts: Options = None) -> dist.Work:
        return self._go(layout.BARRIER, None, options_of(opts, c10d.BarrierOptions), [], self._collectives.barrier)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        limit = self._names.timeout if limit is None else limit
        store = dist.PrefixStore(f"monitored/{next(self._monitored)}", self._store)
        with status.waiting(layout.MONITORED_BARRIER):
            monitored_barrier.pass_together(store, self.rank(), self.size(), limit, wait_all_ranks)

    # ---- a block for each rank

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> dist.Work:
        opts = options_of(opts, c10d.AllgatherOptions)

        def run() -> None:
            for blocks, tensor in zip(outputs, inputs, strict=True):
                self._collectives.all_gather(blocks, tensor)

        return self._go(layout.ALL_GATHER, inputs[0], opts, [tensor for blocks in outputs for tensor in blocks], run)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> dist.Work:
        """``outputs`` has a list for each rank here, not one for each input."""
        opts = options_of(opts, c10d.AllgatherOptions)
        return self.allgather([list(blocks) for blocks in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> dist.Work:
        opts = options_of(opts, c10d.AllgatherOptions)
        return self._go(layout.ALL_GATHER, input, opts, [output], lambda: self._collectives.all_gather(output, input))

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> dist.Work:
        opts = options_of(opts, c10d.AllgatherOptions)

        def run() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._collectives.all_gather(output, tensor)

        return self._go(layout.ALL_GATHER, inputs[0], opts, outputs, run)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> dist.Work:
        opts = options_of(opts, c10d.GatherOptions)
        (tensor,) = inputs
        blocks = outputs[0] if outputs else []
        return self._go(
            layout.GATHER, tensor, opts, blocks, lambda: self._collectives.gather(blocks, tensor, opts.rootRank)
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None) -> dist.Work:
        opts = options_of(opts, c10d.ScatterOptions)
        (output,) = outputs
        blocks = inputs[0] if inputs else []
        return self._go(
            layout.SCATTER, output, opts, outputs, lambda: self._collectives.scatter(output, blocks, opts.rootRank)
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None) -> dist.Work:
        opts = options_of(opts, c10d.ReduceScatterOptions)

        def run() -> None:
            for output, blocks in zip(outputs, inputs, strict=True):
                self._collectives.reduce_scatter(output, blocks, opts.reduceOp)

        return self._go(layout.REDUCE_SCATTER, outputs[0], opts, outputs, run)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> dist.Work:
        opts = options_of(opts, c10d.ReduceScatterOptions)
        return self._go(
            layout.REDUCE_SCATTER,
            output,
            opts,
            [output],
            lambda: self._collectives.reduce_scatter(output, input, opts.reduceOp),
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> dist.Work:
        opts = options_of(opts, c10d.ReduceScatterOptions)

        def run() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._collectives.reduce_scatter(output, tensor, opts.reduceOp)

        return self._go(layout.REDUCE_SCATTER, outputs[0], opts, outputs, run)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> dist.Work:
        opts = options_of(opts, c10d.AllToAllOptions)
        run = functools.partial(self._collectives.all_to_all, outputs, inputs)
        return self._go(layout.ALL_TO_ALL, inputs[0], opts, outputs, run)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Options = None
    ) -> dist.Work:
        opts = options_of(opts, c10d.AllToAllOptions)

        def run() -> None:
            self._collectives.all_to_all_single(output, input, output_splits, input_splits)

        return self._go(layout.ALL_TO_ALL, input, opts, [output], run)

    # ---- from one to another

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return self._messages.send(tensor, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return self._messages.receive(tensor, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return self._messages.receive(tensor, None, tag)

    # ---- life

    def getBackendName(self) -> str:
        return "gloo" if self.substitutes_gloo else "shm"

    def __repr__(self) -> str:
        kind = dist.ProcessGroup if self.substitutes_gloo else type(self)
        return f"<{kind.__module__}.{kind.__qualname__} object at {id(self):#x}>"

    @property
    def seconds_in_collectives(self) -> float:
        """Since the group was made, with the waiting for other ranks."""
        return self._work_queue.seconds

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._names.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._names.timeout = timeout.total_seconds()
        self._collectives.set_timeout(timeout.total_seconds())

    def record(self, on: bool) -> None:
        """Off, it notes nothing in the rank's page. For measuring what that costs; nothing may run meanwhile."""
        self._work_queue.page, self._work_queue.log = (self._book.page, self._log) if on else (None, None)
        if isinstance(self._collectives, Collectives):
            self._collectives.keep(self._work_queue.log)

    def shutdown(self) -> None:
        """Leaves the group, when what was asked for is done."""
        if not self._work_queue.closed:
            self._work_queue.close("the process group has been shut down.")
            self._messages.close("the process group has been shut down.")
            self._collectives.close()
            super().shutdown()

    def abort(self) -> None:
        """Ends every wait of every rank in this group at once."""
        if not self._work_queue.closed:
            self._collectives.abort()
            self.shutdown()

    def _forked(self) -> None:
        self._work_queue = WorkQueue(self._names.group, None)
        no_place = "this process was forked from a rank and is not part of the group; start it as a new process."
        self._work_queue.closed = self._messages.closed = no_place
        self._collectives.forked()

    # The names that torch before 2.13 calls.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


_living: weakref.WeakSet[ShmGroup] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [group._forked() for group in _living])
