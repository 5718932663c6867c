"""Which rank writes what of a replicated state, and the copies it writes from. No rank has to ask another for it.

Tensors that are equal on all ranks are laid end to end and cut into pieces of the same number of bytes; a large tensor
is cut between its rows. The plan follows from names and shapes alone, so every rank makes the same one by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.checkpoint.flatten import Flat, Piece, digest
from phalanx.checkpoint.storage.base import ALIGNED
from phalanx.checkpoint.storage.records import Share
from phalanx.checkpoint.storage.shard_file import Slot, dtype_name, lay_out
from phalanx.errors import CheckpointError
from phalanx.torch_compat.tensors import VERSION

_LEAST_TO_CUT = 1 << 20
"""A smaller tensor stays in one piece: each piece costs an entry in a file."""

_SAMPLED = 16


@dataclass(frozen=True)
class Part:
    """Rows of a piece, or all of it, that one rank writes."""

    piece: Piece
    first: int
    rows: int

    @property
    def tensor(self) -> Tensor:
        whole = self.piece.tensor
        return whole.narrow(0, self.first, self.rows) if whole.dim() else whole


def plan(pieces: Sequence[Piece], size: int) -> list[list[Part]]:
    """What each of ``size`` ranks writes; of this rank's own pieces nothing is said."""
    parts: list[list[Part]] = [[] for _ in range(size)]
    parts[0] = [whole(piece) for piece in pieces if piece.kind == "buffer"]
    burden = sum(part.tensor.nbytes for part in parts[0])
    for rank, part in _cut([piece for piece in pieces if piece.kind == "shared"], burden, size):
        parts[rank].append(part)
    return parts


def whole(piece: Piece) -> Part:
    return Part(piece, 0, _rows(piece.tensor))


def _cut(shared: Sequence[Piece], burden: int, size: int) -> Iterator[tuple[int, Part]]:
    """Rank 0 begins with the ``burden`` of what only it can write."""
    target = max(1.0, (burden + sum(piece.tensor.nbytes for piece in shared)) / size)
    position = burden
    for piece in shared:
        rows, length = _rows(piece.tensor), piece.tensor.nbytes
        if length < _LEAST_TO_CUT or rows < 2:
            yield min(size - 1, int((position + length / 2) / target)), whole(piece)
        else:
            begin = 0
            for rank in range(size):
                edge = rows if rank == size - 1 else math.ceil(((rank + 1) * target - position) * rows / length)
                end = min(rows, edge)
                if end > begin:
                    yield rank, Part(piece, begin, end - begin)
                    begin = end
        position += length


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements, in any order of its dimensions, are memory without gaps and without overlaps."""
    if tensor.is_contiguous():
        return True
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


class _Late:
    """A dense tensor that is copied later, and what tells whether it was changed before that.

    That is its version; and, since nothing counts what is done to ``parameter.data``, a few elements.
    """

    def __init__(self, name: str, source: Tensor, target: Tensor) -> None:
        self.name, self.source, self.target = name, source, target
        self._version = VERSION.of(source)
        self._sample = self._some()

    def _some(self) -> Tensor:
        count = self.source.numel()
        step = max(1, count // _SAMPLED)
        # One call for any order of the dimensions: this is done for each tensor while training waits.
        return self.source.as_strided((-(-count // step),), (step,), self.source.storage_offset()).clone()

    @property
    def has_changed(self) -> bool:
        if VERSION.of(self.source) != self._version:
            return True
        return not torch.equal(self._sample.view(torch.uint8), self._some().view(torch.uint8))


class Copies:
    """One rank's share as the bytes of its file: what is written is what was there when save() was called.

    Tensors that only an optimizer's step changes are copied by `finish`, off the training thread; whatever would change
    them waits for that. All others are copied by `take`. The memory is used again for the next save, for asking the
    system for it takes longer than the copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._length = 0
        self._late: list[_Late] = []
        self._all_at_once = VERSION.get() is None  # nothing else shows what was changed before it is copied
        self.slots: list[Slot] = []

    def take(self, parts: Sequence[Part]) -> None:
        header, self.slots = lay_out([(part.piece.name, part.tensor, part.first) for part in parts])
        self._length = max([len(header), *(slot.end for slot in self.slots)])
        image = self._room(self._length, parts)
        image[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._late.clear()
        devices = set()
        for part, slot in zip(parts, self.slots, strict=True):
            source = part.tensor
            target = image[slot.begin : slot.end].view(source.dtype).view(source.shape)
            if part.piece.is_late and not self._all_at_once and _is_dense(source):
                self._late.append(_Late(part.piece.name, source, target))
                continue
            devices |= {source.device} if source.is_cuda else set()
            target.copy_(source, non_blocking=source.is_cuda)
        for device in devices:
            torch.cuda.synchronize(device)

    def _room(self, length: int, parts: Sequence[Part]) -> Tensor:
        """Aligned, so that a disk can be written to from it directly."""
        if len(self._memory) < length:
            pinned = any(part.tensor.is_cuda for part in parts)
            whole = torch.empty(length + ALIGNED, dtype=torch.uint8, pin_memory=pinned)
            begin = -whole.data_ptr() % ALIGNED
            self._memory = whole[begin : begin + length]
        return self._memory

    def finish(self) -> None:
        """Copies what `take` has left. CheckpointError if that was changed meanwhile, past every optimizer."""
        try:
            for each in self._late:
                each.target.copy_(each.source)
                if each.has_changed:
                    self._all_at_once = True
                    raise CheckpointError(
                        f"{each.name} was changed in place right after save(), and not by the step of a "
                        "torch.optim.Optimizer, so there is no copy of it as it was; the next saves copy everything "
                        "before they return."
                    )
        finally:
            self._late.clear()

    @property
    def bytes(self) -> int:
        return self._length

    @property
    def content(self) -> memoryview:
        """The file."""
        return memoryview(self._memory[: self._length].numpy())  # type: ignore[arg-type]


def share_of(step: int, flat: Flat, parts: Sequence[Part], rank: int) -> Share:
    """This rank's, before it is written."""
    rows = []
    for part in parts:
        whole = part.piece.tensor
        rows.append((part.piece.name, dtype_name(whole.dtype) or "", tuple(whole.shape), part.first, part.rows))
    return Share(step, digest(flat.pieces), rows, flat.values if rank == 0 else {}, flat.rng)
