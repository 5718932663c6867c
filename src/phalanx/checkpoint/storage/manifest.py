"""The manifest: the last file of a checkpoint to be written, with what all others have to be. No torch here.

It is plain data, and is believed only after each of its fields was checked: names are no paths, sizes fit the files.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpoint.storage.base import Fact, Storage
from phalanx.errors import CheckpointError
from phalanx.system import in_decimal_bytes

MANIFEST = "manifest.json"
LEGACY, CURRENT = 1, 2
_MOST_BYTES = 1 << 28
_MOST_ROWS = 1 << 48
_MOST_RANKS = 1 << 20
MOST_STEPS = 10**18
_FILES = {LEGACY: re.compile(r"__\d+_\d+\.distcp|\.metadata"), CURRENT: re.compile(r"rank-\d+\.safetensors")}

WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Bytes of an element, by the names that safetensors has for dtypes."""


class Broken(Exception):
    """This is no whole checkpoint; the message says why, as the end of a sentence."""


def file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


@dataclass(frozen=True)
class Chunk:
    """Rows of a tensor (along its first dimension) that one rank has written."""

    rank: int
    first: int
    rows: int


@dataclass(frozen=True)
class Described:
    """A tensor of a checkpoint."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """In the order of the rows; together they are the tensor."""

    @property
    def row_bytes(self) -> int:
        return WIDTHS[self.dtype] * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Manifest:
    """What was saved, by how many ranks, in which files."""

    step: int
    time: float
    """When it was whole, seconds since the epoch."""
    world_size: int
    parts: tuple[str, ...]
    """Parts of the `State`: model, optimizer, scheduler, sampler, extra."""
    phalanx: str
    torch: str
    files: Mapping[str, Fact]
    tensors: Mapping[str, Described] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    """What is no tensor, as phalanx.checkpoint.storage.values encodes it."""
    rng: Sequence[Any] = ()
    """The random generators of each rank, likewise."""
    version: int = CURRENT

    @property
    def bytes(self) -> int:
        return sum(fact.bytes for fact in self.files.values())

    def encode(self) -> bytes:
        """CheckpointError for more than `read_manifest` takes."""
        fields: dict[str, Any] = {
            **{name: getattr(self, name) for name in _PLAIN},
            "files": {name: vars(fact) for name, fact in self.files.items()},
            "tensors": {
                name: [each.dtype, each.shape, [[chunk.rank, chunk.first, chunk.rows] for chunk in each.chunks]]
                for name, each in self.tensors.items()
            },
            "values": self.values,
            "rng": self.rng,
        }
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        content = ("{\n" + ",\n".join([*lines, f'"check": {_check(fields)}']) + "\n}\n").encode()
        if len(content) > _MOST_BYTES:
            raise CheckpointError(
                f"what is no tensor in the state of step {self.step} takes {in_decimal_bytes(len(content))}, and a "
                f"checkpoint holds at most {in_decimal_bytes(_MOST_BYTES)} of it; turn large bytes and lists into "
                "tensors."
            )
        return content


_PLAIN = ("version", "step", "time", "world_size", "parts", "phalanx", "torch")


def decode(content: bytes) -> Manifest:
    """Raises Broken for anything that `Manifest.encode` has not written."""
    try:
        fields: dict[str, Any] = json.loads(content, parse_constant=_refuse)
        check = fields.pop("check")
        if check != _check(fields):
            raise Broken(f"{MANIFEST} is damaged: its content does not match its checksum")
        version = fields["version"]
        if type(version) is not int or version < LEGACY:
            raise Broken(f"{MANIFEST} is damaged")
        if version > CURRENT:
            raise Broken(f"{MANIFEST} was written by a later phalanx, {fields.get('phalanx')}")
        return _manifest(fields)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Broken(f"{MANIFEST} is damaged") from None


def _refuse(_: str) -> float:
    raise ValueError


def _check(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _manifest(fields: Mapping[str, Any]) -> Manifest:
    version, size = fields["version"], _count(fields["world_size"], 1, _MOST_RANKS)
    time = fields["time"]
    files = {_file(name, version): Fact(**fact) for name, fact in fields["files"].items()}
    for fact in files.values():
        _count(fact.bytes)
        _count(fact.crc32, most=1 << 32)
    if not (isinstance(time, int | float) and 0 <= time < _MOST_ROWS):
        raise ValueError
    plain = Manifest(
        _count(fields["step"], most=MOST_STEPS),
        float(time),
        size,
        tuple(map(_text, fields["parts"])),
        _text(fields["phalanx"]),
        _text(fields["torch"]),
        files,
        version=version,
    )
    if version == LEGACY:
        return plain
    tensors = {_text(name): described(each, size) for name, each in fields["tensors"].items()}
    _check_room(tensors, files)
    values, rng = fields["values"], fields["rng"]
    if not isinstance(values, dict) or not isinstance(rng, list) or len(rng) != size:
        raise ValueError
    return Manifest(**{**vars(plain), "tensors": tensors, "values": values, "rng": rng})


def described(node: Any, size: int) -> Described:
    """A tensor that ``size`` ranks have written; ValueError and its like for whatever else ``node`` may be."""
    dtype, shape, chunks = node
    if dtype not in WIDTHS or not isinstance(shape, list) or not isinstance(chunks, list):
        raise ValueError
    found = Described(
        dtype,
        tuple(_count(each) for each in shape),
        tuple(Chunk(_count(rank, most=size), _count(first), _count(rows)) for rank, first, rows in chunks),
    )
    at = 0
    for chunk in found.chunks:
        if chunk.first != at:
            raise ValueError
        at += chunk.rows
    if at != (found.shape[0] if found.shape else 1) or len(found.shape) > 64:
        raise ValueError
    if math.prod(max(1, each) for each in found.shape) >= 1 << 63:  # also without elements: torch counts in 64 bits
        raise ValueError
    return found


def _check_room(tensors: Mapping[str, Described], files: Mapping[str, Fact]) -> None:
    """Whoever makes room in memory for these tensors makes no more than their files have."""
    needed = dict.fromkeys(files, 0)
    for each in tensors.values():
        for chunk in each.chunks:
            needed[file_of(chunk.rank)] += chunk.rows * each.row_bytes
    if any(needed[name] > fact.bytes for name, fact in files.items()):
        raise ValueError


def _count(value: Any, least: int = 0, most: int = _MOST_ROWS) -> int:
    if type(value) is not int or not least <= value < most:
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _file(name: str, version: int) -> str:
    if not _FILES[version].fullmatch(name):
        raise ValueError
    return name


def read_manifest(place: Storage, directory: str) -> Manifest:
    """Raises Broken when it is missing, damaged, or a file has another size than it says."""
    try:
        manifest = decode(place.read(directory, MANIFEST, _MOST_BYTES))
        sizes = place.sizes(directory)
    except FileNotFoundError:
        raise Broken(f"it has no {MANIFEST}") from None
    except OSError as error:
        raise Broken(f"it cannot be read: {error.strerror or error}") from None
    for name, fact in manifest.files.items():
        if name not in sizes:
            raise Broken(f"{name} is missing")
        if sizes[name] != fact.bytes:
            raise Broken(f"{name} has {sizes[name]} bytes and should have {fact.bytes}")
    return manifest


def check_file(place: Storage, directory: str, name: str, manifest: Manifest) -> None:
    """Reads the whole file; raises Broken when it is not what was written."""
    fact = manifest.files[name]
    try:
        found = place.fact(directory, name, fact.bytes)
    except OSError as error:
        raise Broken(f"{name} cannot be read: {error.strerror or error}") from None
    if found.bytes != fact.bytes:
        raise Broken(f"{name} has {found.bytes} bytes and should have {fact.bytes}")
    if found.crc32 != fact.crc32:
        raise Broken(f"{name} is damaged: its checksum is {found.crc32:08x} and should be {fact.crc32:08x}")
