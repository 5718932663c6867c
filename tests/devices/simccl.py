"""A process group with the manners of NCCL's, for the device "sim": the backend "simccl".

A collective goes into the device's queue, and `wait()` returns at once: it orders kernels, not the host. A collective
that takes longer than the timeout ends the process from a watchdog's thread, by SIGABRT and without a Python error.
The exchange itself is gloo's.
"""

# torch's stubs have the methods of a process group as Python calls them, not as a backend in Python has them.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tests.devices import sim

NAME = "simccl"
_WATCH_EVERY = 0.1
"""Seconds between two looks of the watchdog."""
_ends = threading.Event()
"""The process ends; a thread that frees tensors then would abort it."""


class Work(dist.Work):
    """A collective that was put into the queue."""

    def __init__(self, name: str, number: int, tensors: Any, numel: int) -> None:
        super().__init__()
        self.name, self.number, self.numel = name, number, numel
        self.since = time.monotonic()
        self._done = sim.Event()
        self._done.record()
        self._future: Future[Any] = Future()
        self._future.set_result(tensors)  # for the queue it is done: what follows comes after it

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return self._done.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def get_future(self) -> Future[Any]:
        return self._future


class SimCCL(dist.ProcessGroup):
    """One group of ranks."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # The gloo inside must not give up before the watchdog does.
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout + timedelta(hours=1))
        self._timeout, self._number = timeout.total_seconds(), 0
        self._works: list[Work] = []
        self.abort_takes = 0.0
        """Seconds, as an abort of NCCL that waits for a device."""
        thread = threading.Thread(target=self._watch, name="simccl-watchdog", daemon=True)
        thread.start()
        atexit.register(lambda: (_ends.set(), thread.join()))

    def getBackendName(self) -> str:
        return NAME

    @property
    def collectives_called(self) -> int:
        """What torch itself tells of NCCL alone."""
        return self._number

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        # gloo has no AVG
        average = options.reduceOp == dist.ReduceOp.AVG
        if average:
            options.reduceOp = dist.ReduceOp.SUM

        def run(values: list[Tensor]) -> None:
            self._gloo.allreduce(values, options).wait()
            if average:
                for value in values:
                    value.div_(self.size())

        return self._launch("ALLREDUCE", _several(tensors), run)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return works[-1]

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0 if opts is None else opts.rootRank
        return self._launch("BROADCAST", _several(tensors), lambda values: self._gloo.broadcast(values, options).wait())

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        to = [sim.buffer(tensor) for tensor in outputs[0]]
        return self._launch(
            "ALLGATHER", inputs, lambda values: self._gloo.allgather([[sim.values(one) for one in to]], values).wait()
        )

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        to = sim.buffer(output)

        def run(values: list[Tensor]) -> None:
            parts = list(sim.values(to).view(self.size(), -1))
            self._gloo.allgather([parts], [values[0].view(-1)]).wait()

        return self._launch("ALLGATHER", [source], run)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        """As torch 2.13 calls it."""
        return self._allgather_base(output, source, opts)

    def barrier(self, opts: Any = None) -> Work:
        """As NCCL's: an all_reduce, and the host waits for the device."""
        work = self._launch("BARRIER", [], lambda _: self._gloo.barrier().wait())
        sim.device.synchronize()
        return work

    def abort(self) -> None:
        time.sleep(self.abort_takes)

    def _launch(self, name: str, tensors: Sequence[Tensor], run: Callable[[list[Tensor]], object]) -> Work:
        buffers = [sim.buffer(tensor) for tensor in tensors]
        self._number += 1
        sim.device.launch(lambda: run([sim.values(one) for one in buffers]))
        work = Work(name, self._number, list(tensors), sum(tensor.numel() for tensor in tensors))
        self._works.append(work)
        return work

    def _watch(self) -> None:
        while not _ends.wait(_WATCH_EVERY):
            while self._works and self._works[0].is_completed():
                self._works.pop(0)
            if self._works and time.monotonic() - self._works[0].since > self._timeout:
                self._end(self._works[0])

    def _end(self, work: Work) -> None:
        ran = round((time.monotonic() - work.since) * 1000)
        group = f"[PG ID 0 PG GUID 0(default_pg) Rank {self.rank()}]"
        sizes = f"NumelIn={work.numel}, NumelOut={work.numel}, Timeout(ms)={self._timeout * 1000:.0f}"
        text = (
            f"[rank{self.rank()}]:[E ProcessGroupSIM.cpp:1] {group} Watchdog caught collective operation timeout: "
            f"Work(SeqNum={work.number}, OpType={work.name}, {sizes}) ran for {ran} milliseconds before timing out.\n"
            "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        )
        os.write(2, text.encode())
        os.abort()


def _several(tensors: Any) -> list[Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimCCL:
    return SimCCL(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _create, devices=[sim.NAME])
