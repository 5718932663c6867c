"""DCP's writer and reader over a `Place`: its formats, our files, with every byte counted and summed on its way."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from phalanx.checkpoint.place import Fact, Place

Name = str | os.PathLike[str]


class _Sum(io.RawIOBase):
    """Writes on, and knows what the file will be."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = self._crc = 0
        self.failure: OSError | None = None
        """torch.save has no words for it: it says that a position is not the one it expected."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._crc = zlib.crc32(view, self._crc)
        self._size += len(view)
        try:
            self._file.write(view)
        except OSError as error:
            self.failure = error
            raise
        return len(view)

    def tell(self) -> int:
        return self._size

    @property
    def fact(self) -> Fact:
        return Fact(self._size, self._crc)


class Files(FileSystemBase):
    """One checkpoint's directory, as DCP sees a file system."""

    def __init__(self, place: Place, directory: str) -> None:
        self._place, self._directory = place, directory
        self.facts: dict[str, Fact] = {}
        """Of what was written here."""

    @contextlib.contextmanager
    def create_stream(self, path: Name, mode: str) -> Iterator[io.IOBase]:
        name = os.fspath(path)
        if mode == "rb":
            with self._place.open(self._directory, name) as file:
                yield cast(io.IOBase, file)
            return
        with self._place.create(self._directory, name) as file:
            summed = _Sum(file)
            try:
                yield summed
            except Exception as error:
                if summed.failure is not None and summed.failure is not error:
                    raise summed.failure from error
                raise
        self.facts[name] = summed.fact

    def write(self, name: str, content: bytes) -> None:
        with self.create_stream(name, "wb") as stream:
            cast(Any, stream).write(content)

    def concat_path(self, path: Name, suffix: str) -> Name:
        return suffix  # a name in the one directory there is

    def rename(self, path: Name, new_path: Name) -> None:
        self._place.rename_file(self._directory, os.fspath(path), os.fspath(new_path))
        self.facts[os.fspath(new_path)] = self.facts.pop(os.fspath(path))

    def init_path(self, path: Name) -> Name:
        return path

    def mkdir(self, path: Name) -> None:
        self._place.make(self._directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Name) -> bool:
        return True

    def exists(self, path: Name) -> bool:
        return False  # a directory that is being written has no metadata yet

    def rm_file(self, path: Name) -> None:
        raise AssertionError("nothing that DCP asks for is removed")


class Writer(FileSystemWriter):
    """DCP's writer of one rank's share."""

    def __init__(self, files: Files, directory: str) -> None:
        # Syncing is done when a file is closed, and copies are made already.
        super().__init__(directory, sync_files=False, per_thread_copy_ahead=0)
        self.fs = files  # type: ignore[assignment]


class _Reader(FileSystemReader):
    def __init__(self, files: Files) -> None:
        super().__init__("unused")
        self.fs = files  # type: ignore[assignment]


class _Planner(DefaultLoadPlanner):
    """Nothing is put where it once was: what was pickled on a card comes back on the CPU."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=False)
        cast(dict[str, Any], self.state_dict)[read_item.dest_index.fqn] = loaded


def read_metadata(place: Place, directory: str) -> Metadata:
    return _Reader(Files(place, directory)).read_metadata()


def read_values(place: Place, directory: str, metadata: Metadata, names: list[str]) -> dict[str, Any]:
    """Tensors on the CPU, and objects, by name."""
    reader, planner = _Reader(Files(place, directory)), _Planner(flatten_state_dict=False)
    values: dict[str, Any] = {name: _room(metadata.state_dict_metadata, name) for name in names}
    planner.set_up_planner(values, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return cast(dict[str, Any], planner.state_dict)


def _room(known: Mapping[str, Any], name: str) -> Tensor | None:
    entry = known[name]
    return torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
