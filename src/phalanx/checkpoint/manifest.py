"""The manifest: the last file of a checkpoint to be written, with what all others have to be. No torch here."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.checkpoint.place import Fact, Place

MANIFEST = "manifest.json"
_VERSION = 1


class Broken(Exception):
    """This is no whole checkpoint; the message says why, as the end of a sentence."""


@dataclass(frozen=True)
class Manifest:
    """What was saved, by how many ranks, in which files."""

    step: int
    time: float
    """When it was whole, seconds since the epoch."""
    world_size: int
    parts: tuple[str, ...]
    """Of `State`: model, optimizer, scheduler, sampler, extra."""
    phalanx: str
    torch: str
    files: Mapping[str, Fact]

    @property
    def bytes(self) -> int:
        return sum(fact.bytes for fact in self.files.values())

    def encode(self) -> bytes:
        fields = {"version": _VERSION, **asdict(self)}
        return json.dumps({**fields, "check": _check(fields)}, indent=1).encode() + b"\n"


def decode(content: bytes) -> Manifest:
    """Raises Broken for anything that `Manifest.encode` has not written."""
    try:
        fields: dict[str, Any] = json.loads(content)
        check = fields.pop("check")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Broken(f"{MANIFEST} is damaged") from None
    if check != _check(fields):
        raise Broken(f"{MANIFEST} is damaged: its content has another checksum than it says")
    if fields.pop("version") != _VERSION:
        raise Broken(f"{MANIFEST} was written by a later phalanx, {fields.get('phalanx')}")
    files = {name: Fact(**fact) for name, fact in fields.pop("files").items()}
    return Manifest(**{**fields, "parts": tuple(fields["parts"])}, files=files)


def _check(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def read_manifest(place: Place, directory: str) -> Manifest:
    """Raises Broken when it is missing, damaged, or a file has another size than it says."""
    try:
        manifest = decode(place.read(directory, MANIFEST))
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


def check_file(place: Place, directory: str, name: str, manifest: Manifest) -> None:
    """Reads the whole file; raises Broken when it is not what was written."""
    try:
        found = place.fact(directory, name)
    except OSError as error:
        raise Broken(f"{name} cannot be read: {error.strerror or error}") from None
    fact = manifest.files[name]
    if found.bytes != fact.bytes:
        raise Broken(f"{name} has {found.bytes} bytes and should have {fact.bytes}")
    if found.crc32 != fact.crc32:
        raise Broken(f"{name} is damaged: its checksum is {found.crc32:08x} and should be {fact.crc32:08x}")
