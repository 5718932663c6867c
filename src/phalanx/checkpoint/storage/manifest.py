"""The manifest of a checkpoint: the file that is written last and describes all others. No torch here.

It is plain data, and every field is checked before it is used: file names are no paths, and tensors fit their files.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from phalanx import messages
from phalanx.checkpoint.storage.base import Checksum, Count, Storage
from phalanx.errors import CheckpointError, ForeignData
from phalanx.messages import Rank, Record
from phalanx.system import in_decimal_bytes

MANIFEST = "manifest.json"
VERSION = 2
_MOST_BYTES = 1 << 28
MOST_STEPS = 10**18
_FILE = re.compile(r"rank-\d+\.safetensors")

WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Bytes of an element, by the names that safetensors has for dtypes."""

Encoded = Any
"""A value as phalanx.checkpoint.storage.values encodes it: what JSON can hold."""
Step = Annotated[int, Meta(ge=0, lt=MOST_STEPS)]


class Broken(Exception):
    """A directory holds no whole checkpoint. The message is the reason, as the end of a sentence."""


def shard_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


class Chunk(Record, frozen=True, array_like=True):
    """Rows of a tensor (along its first dimension) that one rank has written."""

    rank: Rank
    first: Count
    rows: Count


class SavedTensor(Record, frozen=True, array_like=True):
    """A tensor of a checkpoint, or what one rank has written of it."""

    dtype: str
    """The name that safetensors has for it."""
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]
    """Chunks in the order of the rows; together they are the tensor."""

    @property
    def row_bytes(self) -> int:
        return WIDTHS[self.dtype] * math.prod(self.shape[1:])

    def check_whole(self) -> None:
        """Raises ValueError unless the chunks make a whole tensor that torch can hold."""
        row = 0
        for chunk in self.chunks:
            if chunk.first != row:
                raise ValueError("rows are missing")
            row += chunk.rows
        if row != (self.shape[0] if self.shape else 1) or len(self.shape) > 64 or self.dtype not in WIDTHS:
            raise ValueError("not a tensor")
        if math.prod(max(1, each) for each in self.shape) >= 1 << 63:  # torch counts in 64 bits, also without elements
            raise ValueError("too large")


class Manifest(Struct, frozen=True, kw_only=True):
    """The description of a checkpoint: what was saved, by how many ranks, in which files."""

    version: int = VERSION
    step: Step
    time: Annotated[float, Meta(ge=0, lt=1 << 48)]
    """Seconds since the epoch when the checkpoint was complete."""
    world_size: Annotated[int, Meta(ge=1, lt=1 << 20)]
    parts: tuple[str, ...]
    """Parts of the `State`: model, optimizer, scheduler, sampler, extra."""
    phalanx: str
    torch: str
    files: dict[str, Checksum]
    tensors: dict[str, SavedTensor] = {}
    values: dict[str, Encoded] = {}
    """All other values of the state, by part."""
    rng: list[Encoded] = []
    """The random number generators of each rank."""

    def __post_init__(self) -> None:
        """Raises ValueError unless the fields fit each other: reading allocates no more memory than the files have."""
        if not all(_FILE.fullmatch(name) for name in self.files):
            raise ValueError("not a file of a checkpoint")
        needed = dict.fromkeys(self.files, 0)
        for tensor in self.tensors.values():
            tensor.check_whole()
            for chunk in tensor.chunks:
                name = shard_name(chunk.rank)
                needed[name] = needed.get(name, 0) + chunk.rows * tensor.row_bytes
                if chunk.rank >= self.world_size or name not in self.files or needed[name] > self.files[name].bytes:
                    raise ValueError("more tensors than bytes")
        if len(self.rng) != self.world_size:
            raise ValueError("not the generators of every rank")

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        """Returns the content of the file; CheckpointError if `read_manifest` would refuse it as too large."""
        fields = msgspec.to_builtins(self)
        fields["check"] = _check(fields)
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        content = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
        if len(content) > _MOST_BYTES:
            raise CheckpointError(
                f"what is no tensor in the state of step {self.step} takes {in_decimal_bytes(len(content))}, and a "
                f"checkpoint holds at most {in_decimal_bytes(_MOST_BYTES)} of it; turn large bytes and lists into "
                "tensors."
            )
        return content


def _check(fields: dict[str, Encoded]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _refuse_constant(text: str) -> float:
    raise ValueError(text)


def decode(content: bytes) -> Manifest:
    """Raises Broken for anything that `Manifest.encode` has not written."""
    try:
        fields = json.loads(content, parse_constant=_refuse_constant)
        if fields.pop("check") != _check(fields):
            raise Broken(f"{MANIFEST} is damaged: its content does not match its checksum")
        version = fields["version"]
        if type(version) is int and version != VERSION:
            raise Broken(f"{MANIFEST} was written by another phalanx, {fields.get('phalanx')}")
        return msgspec.convert(fields, Manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Broken(f"{MANIFEST} is damaged") from None


def read_manifest(storage: Storage, directory: str) -> Manifest:
    """Raises Broken if the manifest is missing or damaged, or if a file does not have the size that it lists."""
    try:
        manifest = decode(storage.read(directory, MANIFEST, _MOST_BYTES))
        sizes = storage.sizes(directory)
    except FileNotFoundError:
        raise Broken(f"it has no {MANIFEST}") from None
    except OSError as error:
        raise Broken(f"it cannot be read: {error.strerror or error}") from None
    for name, written in manifest.files.items():
        if name not in sizes:
            raise Broken(f"{name} is missing")
        _check_size(name, sizes[name], written)
    return manifest


def check_file(storage: Storage, directory: str, name: str, manifest: Manifest) -> None:
    """Reads a whole file; raises Broken if it is not the one that was written."""
    written = manifest.files[name]
    try:
        found = storage.checksum(directory, name, written.bytes)
    except OSError as error:
        raise Broken(f"{name} cannot be read: {error.strerror or error}") from None
    _check_size(name, found.bytes, written)
    if found.crc32 != written.crc32:
        raise Broken(f"{name} is damaged: its checksum is {found.crc32:08x} and should be {written.crc32:08x}")


def _check_size(name: str, size: int, written: Checksum) -> None:
    if size != written.bytes:
        raise Broken(f"{name} has {size} bytes and should have {written.bytes}")


class Share(Record, frozen=True):
    """The record that one rank publishes in the store when it has written its file, or could not."""

    step: Step
    digest: str
    """A hash of the names, types and shapes that all ranks must save alike."""
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    """The rows of each tensor that this rank has written."""
    values: dict[str, Encoded] = field(default_factory=dict)
    rng: Encoded = None
    checksum: Checksum = Checksum(0, 0)
    error: str = ""

    @staticmethod
    def decode(content: Encoded, rank: int) -> Share:
        try:
            return messages.fit(content, Share, "the store")
        except ForeignData:
            message = f"what rank {rank} has reported for the checkpoint is damaged; save again."
            raise CheckpointError(message) from None


def check_agreement(shares: Sequence[Share]) -> None:
    """Raises CheckpointError unless these shares make one checkpoint."""
    for share in shares:
        if share.error:
            raise CheckpointError(share.error)
    first = shares[0]
    for rank, share in enumerate(shares):
        if share.step != first.step:
            raise CheckpointError(
                f"rank 0 saves step {first.step} and rank {rank} saves step {share.step}; save on all ranks alike."
            )
        if share.digest != first.digest:
            raise CheckpointError(
                f"at step {first.step} rank 0 and rank {rank} save different names, types or shapes; give save() the "
                "same parts on all ranks."
            )


def merge_tensors(shares: Sequence[Share]) -> dict[str, SavedTensor]:
    """Returns every tensor of the checkpoint, with the rows that each rank has written of it."""
    merged: dict[str, SavedTensor] = {}
    for rank, share in enumerate(shares):
        for name, tensor in share.tensors.items():
            before = merged[name].chunks if name in merged else ()
            own = (Chunk(rank, chunk.first, chunk.rows) for chunk in tensor.chunks)
            merged[name] = SavedTensor(tensor.dtype, tensor.shape, (*before, *own))
    return merged
