"""A rank's file of a checkpoint, in the format of safetensors: a header that says where each tensor is, and the bytes.

    8 bytes   the length of the header
    header    JSON: {"__metadata__": {"DCP_SHARDING_INFO": …}, name: {"dtype", "shape", "data_offsets"}, …}
    data      the tensors one after the other, without gaps

DCP_SHARDING_INFO says which rows of a tensor are in this file; torch's HuggingFaceStorageReader understands it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from phalanx.checkpoint.storage.base import Storage
from phalanx.checkpoint.storage.manifest import WIDTHS, Broken, Manifest, file_of

_MOST_HEADER = 100_000_000
"""Bytes; safetensors itself reads no larger ones."""
_ALIGNED = 64

_NAMES: dict[torch.dtype, str] = {
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
    _NAMES[torch.float8_e8m0fnu] = "F8_E8M0"
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """None for those that safetensors does not have."""
    return _NAMES.get(dtype)


@dataclass(frozen=True)
class Slot:
    """Where one tensor, or some rows of it, is in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Bytes from the beginning of the file."""
    end: int


def lay_out(parts: Sequence[tuple[str, Tensor, int]]) -> tuple[bytes, list[Slot]]:
    """The header for these tensors, each with its name and its first row in the whole; and a slot for each.

    Wide types come first, so that every tensor is aligned.
    """
    order = sorted(range(len(parts)), key=lambda number: -parts[number][1].element_size())
    entries: dict[str, Any] = {}
    offsets: dict[str, Any] = {}
    at = 0
    for name, tensor, first in (parts[number] for number in order):
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        offsets[name] = {"saved_offsets": [first, *[0] * (tensor.dim() - 1)] if tensor.dim() else []}
        at = end
    about = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    header = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNED)
    start = len(header) + 8
    slots = [
        Slot(name, each["dtype"], tuple(each["shape"]), *(start + offset for offset in each["data_offsets"]))
        for name, each in ((name, entries[name]) for name, _, _ in parts)
    ]
    return len(header).to_bytes(8, "little") + header, slots


def read_header(file: IO[bytes], size: int) -> dict[str, Slot]:
    """The tensors of a file that has ``size`` bytes. Raises Broken for what is no such header, or fits no such file."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_HEADER, size - 8):
            raise ValueError
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        slots = [_slot(name, entry, length + 8) for name, entry in entries.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise Broken("its header is damaged") from None
    at = length + 8
    for slot in sorted(slots, key=lambda slot: (slot.begin, slot.end)):
        if slot.begin != at:
            raise Broken("its header has gaps between tensors, or tensors that overlap")
        at = slot.end
    if at != size:
        raise Broken("its header describes another number of bytes than there are")
    return {slot.name: slot for slot in slots}


def _slot(name: str, entry: Any, start: int) -> Slot:
    (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
    if not all(type(each) is int and each >= 0 for each in (begin, end, *shape)):
        raise ValueError
    if end - begin != WIDTHS[dtype] * math.prod(shape):
        raise ValueError
    return Slot(name, dtype, tuple(shape), start + begin, start + end)


class Shards:
    """Reads the tensors of a checkpoint, from whichever files they are in. A context manager."""

    def __init__(self, place: Storage, directory: str, manifest: Manifest) -> None:
        self._place, self._directory, self._manifest = place, directory, manifest
        self._files: dict[str, tuple[IO[bytes], dict[str, Slot]]] = {}
        self._names: set[str] = set()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        for file, _slots in self._files.values():
            file.close()

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. Each can be had once: together they are no larger than their files."""
        known = self._manifest.tensors.get(name)
        if known is None:
            raise Broken("a value of it names a tensor that it does not have")
        if name in self._names:
            raise Broken("two values of it name the same tensor")
        self._names.add(name)
        tensor = torch.empty(known.shape, dtype=_DTYPES[known.dtype])
        for chunk in known.chunks:
            file, slots = self._open(file_of(chunk.rank))
            shape = (chunk.rows, *known.shape[1:]) if known.shape else ()
            slot = slots.get(name)
            if slot is None or (slot.dtype, slot.shape) != (known.dtype, shape):
                raise Broken(f"{file_of(chunk.rank)} has another {name[:200]} than the manifest")
            file.seek(slot.begin)
            _fill(file, tensor.narrow(0, chunk.first, chunk.rows) if known.shape else tensor)
        return tensor

    def _open(self, name: str) -> tuple[IO[bytes], dict[str, Slot]]:
        if name not in self._files:
            file = self._place.open(self._directory, name)
            try:
                self._files[name] = file, read_header(file, self._manifest.files[name].bytes)
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
