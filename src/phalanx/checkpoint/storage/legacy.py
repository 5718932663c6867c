"""Checkpoints of the form that was written before: files of torch.distributed.checkpoint (DCP), which are pickles.

Reading one runs whatever its author has put there, so only a user who says trust=True gets here.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from phalanx.checkpoint.storage.base import Storage


class Legacy:
    """The content of one such checkpoint."""

    def __init__(self, place: Storage, directory: str) -> None:
        self._reader = _Reader(_Files(place, directory))
        self._metadata = self._reader.read_metadata()
        self._paths: Mapping[str, tuple[Any, ...]] = self._metadata.planner_data

    @property
    def model(self) -> dict[str, tuple[int, ...] | None]:
        """The entries of the model's state dict, with the shapes of those that are tensors."""
        return {
            name.removeprefix("model."): tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in self._metadata.state_dict_metadata.items()
            if self._paths[name][0] == "model"
        }

    def read(self, parts: set[str], rank: int) -> tuple[dict[str, Any], Any]:
        """Those parts and ``extra``, as `State.load_state_dict` takes them, and the random generators of a rank."""
        names = [name for name, path in self._paths.items() if path[0] in {"step", "extra", *parts}]
        rng = f"rng.{rank}"
        found = self._values([*names, rng])
        root: dict[str, Any] = {"optimizer": {"state": {}, "param_groups": []}}
        for name in names:
            _put(root, self._paths[name], found[name])
        if not root["optimizer"]["param_groups"]:
            del root["optimizer"]
        return root, found[rng]

    def _values(self, names: list[str]) -> dict[str, Any]:
        planner = _Planner(flatten_state_dict=False)
        planner.set_up_planner({name: self._room(name) for name in names}, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return cast(dict[str, Any], planner.state_dict)

    def _room(self, name: str) -> Tensor | None:
        entry = self._metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype)


class _Files(FileSystem):
    """One checkpoint's directory, as DCP sees a file system."""

    def __init__(self, place: Storage, directory: str) -> None:
        self._place, self._directory = place, directory

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with self._place.open(self._directory, os.fspath(path)) as file:
            yield cast(io.IOBase, file)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix  # a name in the one directory there is


class _Reader(FileSystemReader):
    def __init__(self, files: _Files) -> None:
        super().__init__("unused")
        self.fs = files


class _Planner(DefaultLoadPlanner):
    """Nothing is put where it once was: what was pickled on a GPU comes back on the CPU."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=False)
        cast(dict[str, Any], self.state_dict)[read_item.dest_index.fqn] = loaded


def _put(root: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    place: Any = root
    for key, following in itertools.pairwise(path):
        if isinstance(place, list):
            while len(place) <= int(key):
                place.append({})
            place = place[int(key)]
        else:
            place = place.setdefault(key, [] if isinstance(following, int) else {})
    place[path[-1]] = value
