"""The process group `shm`: runs what torch.distributed calls in order, by shared memory within a node.

`Messages` does send and recv within a node; a gloo group inside reduces sparse tensors, which are rare.
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

from phalanx.shm import monitored_barrier
from phalanx.shm.hierarchical import gloo_groups
from phalanx.shm.hierarchical.topology import sort_into_nodes
from phalanx.shm.node.collectives import NodeCollectives
from phalanx.shm.node.failures import Names
from phalanx.shm.node.p2p import Messages
from phalanx.shm.node.segment import Segment
from phalanx.shm.node.status_log import StatusLog
from phalanx.shm.node.tensors import REDUCE_CODES, Blocks, is_contiguous
from phalanx.shm.node.work_queue import Finished, WorkQueue
from phalanx.shm.staged_collectives import StagedCollectives, run_all
from phalanx.status import layout, own_page
from phalanx.status.layout import ALL_REDUCE
from phalanx.store import join
from phalanx.store.tcp_store import part_for_each_use
from phalanx.torch_compat.c10d import add_default_backend, new_gloo

if TYPE_CHECKING:
    from phalanx.shm.hierarchical.collectives import HierarchicalCollectives

_FINISHED = Finished()
_UNSET = c10d.AllreduceOptions().timeout
_Opts = c10d.ReduceOptions | None
"""The options of any collective: ReduceOptions has the fields of all of them."""


def _options(given: _Opts, kind: type) -> c10d.ReduceOptions:
    """Returns the options of a call. torch's own groups also take no options, or an operator in their place."""
    if given is None:
        return kind()
    if type(given) is not kind and isinstance(given, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        options = kind()
        options.reduceOp = given
        return options
    return given


class ShmGroup(dist.ProcessGroup):
    """Ranks that share memory on each node, and gloo between nodes if they are on several."""

    substitutes_gloo = False
    """The script has asked for gloo, or for no backend: names and texts are those of gloo."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, size)
        seconds = timeout.total_seconds()
        # torch may give two groups without a common rank the same name, and then the same store.
        store = dist.PrefixStore(",".join(map(str, ranks)), store)
        # A group that is made again after it was destroyed has the same store too, if the launcher serves it.
        store = part_for_each_use(store, rank)
        self._names = Names(name, ranks, seconds)
        self._status_log = StatusLog("0" if name == "world" else name, ranks)
        messages = Messages(rank, self._names, self._status_log)
        shared = dist.PrefixStore("shm", store)
        claims = join.sign_in(shared, rank, size, seconds, note=messages.address)
        self._names.pids = tuple(claim.pid for claim in claims)
        nodes = sort_into_nodes([claim.machine for claim in claims], rank)
        address = gloo_groups.own_address(store, nodes, [claim.host for claim in claims])
        self._gloo = new_gloo(dist.PrefixStore("gloo", store), rank, size, timeout, address, lazy=True)
        # Called directly: through super() torch would hold the interpreter's lock, which gloo's own thread may want.
        add_default_backend(self, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._messages: Messages | gloo_groups.GlooMessages
        self._inner: NodeCollectives | HierarchicalCollectives
        if nodes.count == 1:
            segment = Segment(shared, claims, rank, seconds, self._names)
            messages.connect([claim.note for claim in claims], segment.pidfds)
            self._messages, self._inner = messages, NodeCollectives(segment, seconds)
            segment.set_log(self._status_log.native_log())
        else:
            from phalanx.shm.hierarchical.agreement import Agreement
            from phalanx.shm.hierarchical.collectives import HierarchicalCollectives

            messages.close("the group is on several nodes.")
            self._messages = gloo_groups.GlooMessages(self._gloo, self._names, self._status_log)
            agreement = Agreement(shared, nodes, claims, timeout, self._names, address, self._gloo)
            self._inner = HierarchicalCollectives(agreement)
        self._collectives = StagedCollectives(self._inner, rank, size)
        self._work_queue = WorkQueue(name, self._status_log.page, self._status_log.native)
        self._store, self._monitored = store, itertools.count()
        _living.add(self)

    @property
    def collectives_called(self) -> int:
        return self._work_queue.number

    def _start(
        self,
        op: int,
        tensor: Tensor | None,
        opts: c10d.ReduceOptions,
        result: list[Tensor],
        run: Callable[..., None],
        calls: Sequence[tuple[object, ...]],
    ) -> dist.Work:
        """Runs ``run`` with the arguments of each call, now or in the queue. The status page shows ``tensor``."""
        kind = self._status_log[op, None if tensor is None else tensor.dtype]
        size = 0 if tensor is None else tensor.numel()
        run, arguments = (run, calls[0]) if len(calls) == 1 else (run_all, (run, calls))
        if opts.timeout != _UNSET:
            run, arguments = self._within, (opts.timeout.total_seconds(), run, *arguments)
        if opts.asyncOp:
            return self._work_queue.later(kind, size, functools.partial(run, *arguments), result)
        self._work_queue.now(kind, size, run, *arguments)
        return _FINISHED

    def _within(self, seconds: float, run: Callable[..., None], *arguments: object) -> None:
        """Runs a collective with a timeout of its own."""
        usual = self._names.timeout
        self._inner.set_timeout(seconds)
        try:
            run(*arguments)
        finally:
            self._inner.set_timeout(usual)

    # ---- one block

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: _Opts = None) -> dist.Work:
        tensors = [tensors] if not isinstance(tensors, list) else tensors
        opts = _options(opts, c10d.AllreduceOptions)
        tensor = tensors[0]
        if tensor.layout is not torch.strided:
            return self._gloo.allreduce(tensors, opts)
        op = opts.reduceOp
        if len(tensors) == 1 and not opts.asyncOp:
            # The common case, without what only the others need: that is more than half of the call's time.
            run = self._inner.prepared.get((tensor.dtype, REDUCE_CODES[op.op.value]))
            if run is not None and opts.timeout == _UNSET and is_contiguous(tensor):
                self._work_queue.now(self._status_log[ALL_REDUCE, tensor.dtype], tensor.numel(), run, tensor)
                return _FINISHED
        calls = [(tensor, op) for tensor in tensors]
        return self._start(ALL_REDUCE, tensor, opts, tensors, self._collectives.all_reduce, calls)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: _Opts = None) -> dist.Work:
        opts = _options(opts, c10d.ReduceOptions)
        calls = [(*tensors, opts.reduceOp, opts.rootRank)]
        return self._start(layout.REDUCE, tensors[0], opts, tensors, self._collectives.reduce, calls)

    def broadcast(self, tensors: list[Tensor], opts: _Opts = None) -> dist.Work:
        opts = _options(opts, c10d.BroadcastOptions)
        calls = [(*tensors, opts.rootRank)]
        return self._start(layout.BROADCAST, tensors[0], opts, tensors, self._collectives.broadcast, calls)

    def barrier(self, opts: _Opts = None) -> dist.Work:
        return self._start(layout.BARRIER, None, _options(opts, c10d.BarrierOptions), [], self._inner.barrier, [()])

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        limit = self._names.timeout if timeout is None else timeout
        limit = limit.total_seconds() if isinstance(limit, timedelta) else limit
        store = dist.PrefixStore(f"monitored/{next(self._monitored)}", self._store)
        with own_page.waiting(layout.MONITORED_BARRIER):
            monitored_barrier.pass_together(store, self.rank(), self.size(), limit, wait_all_ranks)

    # ---- a block for each rank

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Opts = None) -> dist.Work:
        opts = _options(opts, c10d.AllgatherOptions)
        result, calls = list(itertools.chain(*outputs)), list(zip(outputs, inputs, strict=True))
        return self._start(layout.ALL_GATHER, inputs[0], opts, result, self._collectives.all_gather, calls)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Opts = None) -> dist.Work:
        """``outputs`` has a list for each rank here, not one for each input."""
        return self.allgather([list(blocks) for blocks in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: _Opts = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: _Opts = None) -> dist.Work:
        opts, calls = _options(opts, c10d.AllgatherOptions), list(zip(outputs, inputs, strict=True))
        return self._start(layout.ALL_GATHER, inputs[0], opts, outputs, self._collectives.all_gather, calls)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Opts = None) -> dist.Work:
        opts = _options(opts, c10d.GatherOptions)
        blocks = outputs[0] if outputs else []
        calls = [(blocks, *inputs, opts.rootRank)]
        return self._start(layout.GATHER, inputs[0], opts, blocks, self._collectives.gather, calls)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _Opts = None) -> dist.Work:
        opts = _options(opts, c10d.ScatterOptions)
        calls = [(*outputs, inputs[0] if inputs else [], opts.rootRank)]
        return self._start(layout.SCATTER, outputs[0], opts, outputs, self._collectives.scatter, calls)

    def reduce_scatter(self, outputs: list[Tensor], inputs: Sequence[Blocks], opts: _Opts = None) -> dist.Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        calls = [(output, blocks, opts.reduceOp) for output, blocks in zip(outputs, inputs, strict=True)]
        return self._start(layout.REDUCE_SCATTER, outputs[0], opts, outputs, self._collectives.reduce_scatter, calls)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: _Opts = None) -> dist.Work:
        return self.reduce_scatter([output], [input], opts)

    reduce_scatter_single_coalesced = reduce_scatter

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: _Opts = None) -> dist.Work:
        opts, run = _options(opts, c10d.AllToAllOptions), self._collectives.all_to_all
        return self._start(layout.ALL_TO_ALL, inputs[0], opts, outputs, run, [(outputs, inputs)])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: _Opts = None
    ) -> dist.Work:
        opts, run = _options(opts, c10d.AllToAllOptions), self._collectives.all_to_all_single
        calls = [(output, input, output_splits, input_splits)]
        return self._start(layout.ALL_TO_ALL, input, opts, [output], run, calls)

    # ---- from one to another

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        return self._messages.send(tensors[0], dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        return self._messages.receive(tensors[0], srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return self._messages.receive(tensors[0], None, tag)

    # ---- life

    def getBackendName(self) -> str:
        return "gloo" if self.substitutes_gloo else "shm"

    def __repr__(self) -> str:
        kind = dist.ProcessGroup if self.substitutes_gloo else type(self)
        return f"<{kind.__module__}.{kind.__qualname__} object at {id(self):#x}>"

    @property
    def seconds_in_collectives(self) -> float:
        """Seconds since the group was made, with the waiting for other ranks."""
        return self._work_queue.seconds

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._names.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._names.timeout = timeout.total_seconds()
        self._inner.set_timeout(timeout.total_seconds())

    def record(self, on: bool) -> None:
        """Turns recording in the status page on or off, to measure its cost. No collective may be running."""
        log, queue = self._status_log, self._work_queue
        queue.page, queue.log = (log.page, log.native) if on else (None, None)
        if isinstance(self._inner, NodeCollectives):
            self._inner.segment.set_log(queue.log)

    def shutdown(self) -> None:
        """Leaves the group when all queued collectives are done."""
        if not self._work_queue.closed:
            self._work_queue.close("the process group has been shut down.")
            self._messages.close("the process group has been shut down.")
            self._inner.close()
            super().shutdown()

    def abort(self) -> None:
        """Ends every wait of every rank in this group at once."""
        if not self._work_queue.closed:
            self._inner.abort()
            self.shutdown()

    def _forked(self) -> None:
        self._work_queue = WorkQueue(self._names.group, None)
        no_place = "this process was forked from a rank and is not part of the group; start it as a new process."
        self._work_queue.closed = self._messages.closed = no_place
        self._inner.forked()

    # The names that torch before 2.13 calls.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


_living: weakref.WeakSet[ShmGroup] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [group._forked() for group in _living])
