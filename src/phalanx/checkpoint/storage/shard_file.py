"""A rank's file of a checkpoint, in the format of safetensors: a header that lists the tensors, and their bytes.

    8 bytes   the length of the header
    header    JSON: {"__metadata__": {"DCP_SHARDING_INFO": …}, name: {"dtype", "shape", "data_offsets"}, …}
    data      the tensors one after the other, without gaps

DCP_SHARDING_INFO lists which rows of a tensor are in this file; torch's HuggingFaceStorageReader reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Sequence
from typing import IO, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint.storage.base import Count, Storage
from phalanx.checkpoint.storage.manifest import WIDTHS, Broken, Chunk, Manifest, shard_name
from phalanx.messages import Record
from phalanx.torch_compat.tensors import tree_map_only

T = TypeVar("T")
_MOST_HEADER = 100_000_000
"""Bytes; safetensors itself reads no larger ones."""
_ALIGNMENT = 64

DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    DTYPE_NAMES[torch.float8_e8m0fnu] = "F8_E8M0"
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Slot(Record, frozen=True):
    """The entry of one tensor, or of some rows of it, in a header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]
    """Its first byte and its end, counted from the end of the header."""


def lay_out(tensors: Sequence[tuple[str, Tensor, int]]) -> tuple[bytes, dict[str, Slot]]:
    """Returns the beginning of the file for these tensors, each with its name and its first row in the whole.

    Wide types come first, so that every tensor is aligned.
    """
    slots: dict[str, Slot] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    end = 0
    for name, tensor, first in sorted(tensors, key=lambda each: -each[1].element_size()):
        begin, end = end, end + tensor.numel() * tensor.element_size()
        slots[name] = Slot(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), (begin, end))
        offsets[name] = {"saved_offsets": [first, *[0] * (tensor.dim() - 1)] if tensor.dim() else []}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    header = json.dumps({"__metadata__": metadata, **msgspec.to_builtins(slots)}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header, slots


def read_header(file: IO[bytes], size: int) -> tuple[int, dict[str, Slot]]:
    """Returns where the data begins, and the tensors. Raises Broken unless they fill a file of ``size`` bytes."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_HEADER, size - 8):
            raise ValueError("no header")
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        slots = msgspec.convert(entries, dict[str, Slot])
        sizes = {name: WIDTHS[slot.dtype] * math.prod(slot.shape) for name, slot in slots.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Broken("its header is damaged") from None
    at = 0
    for name, slot in sorted(slots.items(), key=lambda item: item[1].data_offsets):
        begin, end = slot.data_offsets
        if end - begin != sizes[name]:
            raise Broken("its header is damaged")
        if begin != at:
            raise Broken("its header has gaps between tensors, or tensors that overlap")
        at = end
    if 8 + length + at != size:
        raise Broken("its header describes another number of bytes than there are")
    return 8 + length, slots


class DeferredTensor(Tensor):
    """A tensor of a checkpoint that is read by whatever operation uses it, and not kept: the result is a plain one."""

    read: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.shape.__get__, Tensor.dtype.__get__):  # type: ignore[attr-defined] (they are descriptors)
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = read_deferred((args, kwargs or {}))
        return func(*args, **kwargs)


def read_deferred(tree: T, device: torch.device | str = "cpu") -> T:
    """Returns the same nesting with plain tensors. Single numbers stay on the CPU, as the steps of an optimizer do."""
    return tree_map_only(DeferredTensor, lambda each: each.read().to(device if each.shape else "cpu"), tree)


class ShardReader:
    """Reads the tensors of a checkpoint from all of its files, those in ``deferred`` later. A context manager."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest, deferred: Container[str] = ()) -> None:
        self._storage, self._directory, self._manifest, self._deferred = storage, directory, manifest, deferred
        self._files: dict[str, tuple[IO[bytes], int, dict[str, Slot]]] = {}
        self._names: set[str] = set()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file, _start, _slots in self._files.values():
            file.close()

    def read(self, name: str) -> Tensor:
        """Returns a whole tensor, on the CPU. Each can be named once: together they are no larger than their files."""
        saved = self._manifest.tensors.get(name)
        if saved is None:
            raise Broken("a value of it names a tensor that it does not have")
        if name in self._names:
            raise Broken("two values of it name the same tensor")
        self._names.add(name)
        pieces: list[tuple[IO[bytes], int, Chunk]] = []
        for chunk in saved.chunks:
            file, start, slots = self._open(shard_name(chunk.rank))
            shape = (chunk.rows, *saved.shape[1:]) if saved.shape else ()
            slot = slots.get(name)
            if slot is None or (slot.dtype, slot.shape) != (saved.dtype, shape):
                raise Broken(f"{shard_name(chunk.rank)} has another {name[:200]} than the manifest")
            pieces.append((file, start + slot.data_offsets[0], chunk))

        def read() -> Tensor:
            tensor = torch.empty(saved.shape, dtype=_DTYPES[saved.dtype])
            for file, start, chunk in pieces:
                file.seek(start)
                _fill(file, tensor.narrow(0, chunk.first, chunk.rows) if saved.shape else tensor)
            return tensor

        if name not in self._deferred:
            return read()
        deferred = torch.empty(saved.shape, dtype=_DTYPES[saved.dtype], device="meta").as_subclass(DeferredTensor)
        deferred.read = read
        return deferred

    def _open(self, name: str) -> tuple[IO[bytes], int, dict[str, Slot]]:
        if name not in self._files:
            file = self._storage.open(self._directory, name)
            try:
                self._files[name] = file, *read_header(file, self._manifest.files[name].bytes)
            except Broken as error:
                file.close()
                raise Broken(f"{name} cannot be read: {error}") from None
        return self._files[name]


def _fill(file: IO[bytes], tensor: Tensor) -> None:
    view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    while view:
        if not (count := file.readinto(view)):  # type: ignore[attr-defined]
            raise Broken("a file ends too early")
        view = view[count:]
