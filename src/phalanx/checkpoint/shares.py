"""Who writes what: a replicated state, cut into one share for each rank. No rank has to ask another for it.

Tensors that are equal on all ranks are laid end to end and cut into pieces of the same number of bytes; a large tensor
is cut between its rows. The plan follows from names and shapes alone, so every rank makes the same one by itself.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from phalanx.checkpoint.layout import Piece, random_name

_LEAST_TO_CUT = 1 << 20
"""A smaller tensor stays in one piece: each piece costs a record in the file."""

Rows = tuple[int, int]
"""From and to, along the first dimension."""


def plan(pieces: Sequence[Piece], size: int) -> tuple[list[SavePlan], Metadata]:
    """What each rank writes, and what DCP has to know of the whole."""
    items: list[list[WriteItem]] = [[] for _ in range(size)]
    burden, shared = 0, []
    for piece in pieces:
        if piece.tensor is None:
            items[0].append(_object(piece.name))
        elif piece.is_shared:
            shared.append((piece.name, piece.tensor))
        else:
            items[0].append(_tensor(piece.name, piece.tensor, (0, _rows(piece.tensor))))
            burden += piece.tensor.nbytes
    for name, tensor, rank, rows in _cut(shared, burden, size):
        items[rank].append(_tensor(name, tensor, rows))
    for rank in range(size):
        items[rank].append(_object(random_name(rank)))
    plans, metadata = create_default_global_save_plan([SavePlan(each) for each in items])
    metadata.planner_data = {piece.name: piece.path for piece in pieces}
    metadata.planner_data |= {random_name(rank): ("rng", str(rank)) for rank in range(size)}
    return plans, metadata


def _cut(shared: Sequence[tuple[str, Tensor]], burden: int, size: int) -> Iterator[tuple[str, Tensor, int, Rows]]:
    """Rank 0 begins with the ``burden`` of what only it can write."""
    target = max(1.0, (burden + sum(tensor.nbytes for _, tensor in shared)) / size)
    position = burden
    for name, tensor in shared:
        rows, length = _rows(tensor), tensor.nbytes
        if length < _LEAST_TO_CUT or rows < 2:
            yield name, tensor, min(size - 1, int((position + length / 2) / target)), (0, rows)
        else:
            begin = 0
            for rank in range(size):
                edge = rows if rank == size - 1 else math.ceil(((rank + 1) * target - position) * rows / length)
                end = min(rows, edge)
                if end > begin:
                    yield name, tensor, rank, (begin, end)
                    begin = end
        position += length


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _object(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def _tensor(name: str, tensor: Tensor, rows: Rows) -> WriteItem:
    offsets = torch.Size([rows[0], *[0] * (tensor.dim() - 1)] if tensor.dim() else [])
    sizes = torch.Size([rows[1] - rows[0], *tensor.shape[1:]] if tensor.dim() else [])
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(tensor.dtype), tensor.size())
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


class Copies(DefaultSavePlanner):
    """One rank's share, copied: what is written in the background is what stood there when it was taken.

    The memory of the copies is used again for the next save, for asking the system for it takes longer than the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[Any, Tensor] = {}
        self._objects: dict[str, io.BytesIO] = {}

    def take(self, share: SavePlan, pieces: Sequence[Piece], rng: Any, rank: int) -> None:
        values = {piece.name: piece.value for piece in pieces} | {random_name(rank): rng}
        before, self._copies, self._objects = self._copies, {}, {}
        cards = set()
        for item in share.items:
            value = values[item.index.fqn]
            if item.type == WriteItemType.BYTE_IO:
                self._objects[item.index.fqn] = buffer = io.BytesIO()
                torch.save(value, buffer)
                continue
            source = _part(value, item)
            cards |= {source.device} if source.is_cuda else set()
            self._copies[item.index] = _copy(source, before.get(item.index))
        for card in cards:
            torch.cuda.synchronize(card)

    @property
    def bytes(self) -> int:
        tensors = sum(copy.nbytes for copy in self._copies.values())
        return tensors + sum(buffer.getbuffer().nbytes for buffer in self._objects.values())

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return self._objects[write_item.index.fqn]
        return self._copies[write_item.index]


def _part(tensor: Tensor, item: WriteItem) -> Tensor:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return tensor.narrow(0, chunk.offsets[0], chunk.sizes[0]) if tensor.dim() else tensor


def _copy(source: Tensor, old: Tensor | None) -> Tensor:
    """Into a tensor with nothing else in its memory, for torch.save writes all of that."""
    if old is None or old.shape != source.shape or old.dtype != source.dtype:
        old = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return old.copy_(source, non_blocking=source.is_cuda)
