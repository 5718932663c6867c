"""Assigns the tensors of a replicated state to the ranks, and copies the share of one rank into a buffer.

Tensors that are equal on all ranks are laid end to end and split into equal numbers of bytes; a large tensor is split
between its rows. The plan depends on names and shapes alone, so every rank makes the same one without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.flatten import Flat, NamedTensor, digest
from phalanx.checkpoint.storage.base import ALIGNMENT
from phalanx.checkpoint.storage.manifest import Chunk, SavedTensor, Share
from phalanx.checkpoint.storage.shard_file import DTYPE_NAMES, lay_out
from phalanx.devices import accelerator
from phalanx.errors import CheckpointError
from phalanx.torch_compat.tensors import VERSION

_LEAST_TO_SPLIT = 1 << 20
"""Bytes. A smaller tensor is not split: each chunk costs an entry in a file."""
_SAMPLES = 16


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor, or all of it, that one rank writes."""

    named: NamedTensor
    first: int
    rows: int

    @property
    def tensor(self) -> Tensor:
        whole = self.named.tensor
        return whole.narrow(0, self.first, self.rows) if whole.dim() else whole


def plan(tensors: Sequence[NamedTensor], size: int) -> list[list[TensorRows]]:
    """Returns what each of ``size`` ranks writes, without the tensors that only one rank has."""
    plans: list[list[TensorRows]] = [[] for _ in range(size)]
    plans[0] = [whole(named) for named in tensors if named.kind == "buffer"]
    buffer_bytes = sum(rows.tensor.nbytes for rows in plans[0])
    for rank, rows in _split([named for named in tensors if named.kind == "shared"], buffer_bytes, size):
        plans[rank].append(rows)
    return plans


def whole(named: NamedTensor) -> TensorRows:
    return TensorRows(named, 0, _row_count(named.tensor))


def _split(shared: Sequence[NamedTensor], buffer_bytes: int, size: int) -> Iterator[tuple[int, TensorRows]]:
    """Yields the rank that writes each of them. The buffers, which only rank 0 writes, count for its share."""
    target = max(1.0, (buffer_bytes + sum(named.tensor.nbytes for named in shared)) / size)
    position = buffer_bytes
    for named in shared:
        rows, length = _row_count(named.tensor), named.tensor.nbytes
        if length < _LEAST_TO_SPLIT or rows < 2:
            yield min(size - 1, int((position + length / 2) / target)), whole(named)
        else:
            begin = 0
            for rank in range(size):
                edge = rows if rank == size - 1 else math.ceil(((rank + 1) * target - position) * rows / length)
                end = min(rows, edge)
                if end > begin:
                    yield rank, TensorRows(named, begin, end - begin)
                    begin = end
        position += length


def _row_count(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether its elements fill memory without gaps and overlaps, in any order of its dimensions."""
    if tensor.is_contiguous():
        return True
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


class _DeferredCopy:
    """A dense tensor that is copied later, and a check that it was not changed before.

    That is its version; and, since torch does not count changes of ``parameter.data``, a few elements.
    """

    def __init__(self, name: str, source: Tensor, target: Tensor) -> None:
        self.name, self.source, self.target = name, source, target
        self._version = VERSION.of(source)
        self._samples = self._take_samples()

    def _take_samples(self) -> Tensor:
        count = self.source.numel()
        step = max(1, count // _SAMPLES)
        # One call for any order of the dimensions: it is made for each tensor while training waits.
        return self.source.as_strided((-(-count // step),), (step,), self.source.storage_offset()).clone()

    @property
    def has_changed(self) -> bool:
        if VERSION.of(self.source) != self._version:
            return True
        return not torch.equal(self._samples.view(torch.uint8), self._take_samples().view(torch.uint8))


class ShardBuffer:
    """A copy of one rank's share, as the bytes of its file: the state at the moment of save().

    Tensors that only an optimizer's step changes are copied by `finish`, off the training thread; whatever would change
    them waits for that. All others are copied by `take`. Copies from an accelerator are queued among its kernels, so
    that whatever is launched later comes after them, and `await_devices` waits for them. The memory is reused for the
    next save: to allocate it takes longer than the copy.
    """

    def __init__(self) -> None:
        self._memory = self._allocated = torch.empty(0, dtype=torch.uint8)
        self._copied: list[Any] = []
        """An event for each device, after its copies."""
        self.bytes = 0
        """The length of the file."""
        self._deferred: list[_DeferredCopy] = []
        self._defers = VERSION.get() is not None  # without it, a change before the copy would go unnoticed

    def take(self, share: Sequence[TensorRows]) -> None:
        header, slots = lay_out([(rows.named.name, rows.tensor, rows.first) for rows in share])
        self.bytes = len(header) + max((slot.data_offsets[1] for slot in slots.values()), default=0)
        devices = {rows.tensor.device for rows in share if accelerator.serves(rows.tensor.device)}
        self._reserve(next(iter(devices), None))
        self._memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._deferred.clear()
        for rows in share:
            source, (begin, end) = rows.tensor, slots[rows.named.name].data_offsets
            target = self._memory[len(header) + begin : len(header) + end].view(source.dtype).view(source.shape)
            if rows.named.copy_later and self._defers and _is_dense(source):
                self._deferred.append(_DeferredCopy(rows.named.name, source, target))
                continue
            target.copy_(source, non_blocking=source.device in devices)
        self._copied = [accelerator.recorded_event(device) for device in devices]

    def _reserve(self, device: torch.device | None) -> None:
        """Makes room for the file. The memory is aligned, so that it can be written to a disk directly."""
        if len(self._memory) < self.bytes:
            self._allocated = accelerator.host_memory(self.bytes + ALIGNMENT, device)
            begin = -self._allocated.data_ptr() % ALIGNMENT
            self._memory = self._allocated[begin : begin + self.bytes]

    def finish(self) -> None:
        """Copies the rest. Raises CheckpointError if a tensor was changed before, other than by an optimizer."""
        try:
            for each in self._deferred:
                each.target.copy_(each.source)
                if each.has_changed:
                    self._defers = False
                    raise CheckpointError(
                        f"{each.name} was changed in place right after save(), and not by the step of a "
                        "torch.optim.Optimizer, so there is no copy of it as it was; the next saves copy everything "
                        "before they return."
                    )
        finally:
            self._deferred.clear()

    def await_devices(self) -> None:
        """Waits for the copies of `take`, while training goes on. Raises the error of a device that has failed."""
        for event in self._copied:
            event.synchronize()
        self._copied.clear()

    @property
    def content(self) -> memoryview:
        return memoryview(self._memory[: self.bytes].numpy())  # type: ignore[arg-type]


def share_record(step: int, flat: Flat, share: Sequence[TensorRows], rank: int) -> Share:
    """Describes the share of this rank, before it is written."""
    tensors: dict[str, SavedTensor] = {}
    for rows in share:
        whole = rows.named.tensor
        chunk = Chunk(rank, rows.first, rows.rows)
        tensors[rows.named.name] = SavedTensor(DTYPE_NAMES[whole.dtype], tuple(whole.shape), (chunk,))
    return Share(step, digest(flat.tensors), tensors, flat.values if rank == 0 else {}, flat.rng)
