"""Checkpoints in the old format: files of torch.distributed.checkpoint (DCP), which are pickles.

Reading one runs whatever code its author has put there, so it needs trust=True.
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
from phalanx.checkpoint.storage.values import StateDict

Path = tuple[str | int, ...]


class LegacyCheckpoint:
    """The content of one such checkpoint."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._reader = FileSystemReader("unused")
        self._reader.fs = _Files(storage, directory)
        self._metadata = self._reader.read_metadata()
        self._paths: Mapping[str, Path] = self._metadata.planner_data

    @property
    def model_shapes(self) -> dict[str, tuple[int, ...] | None]:
        return {
            name.removeprefix("model."): tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in self._metadata.state_dict_metadata.items()
            if self._paths[name][0] == "model"
        }

    def read(self, parts: set[str], rank: int, *_: object) -> tuple[StateDict, object]:
        names = [name for name, path in self._paths.items() if path[0] in {"step", "extra", *parts}]
        rng = f"rng.{rank}"
        found = self._values([*names, rng])
        root: StateDict = {"optimizer": {"state": {}, "param_groups": []}}
        for name in names:
            _put(root, self._paths[name], found[name])
        if not root["optimizer"]["param_groups"]:
            del root["optimizer"]
        return root, found[rng]

    def _values(self, names: list[str]) -> StateDict:
        planner = _Planner(flatten_state_dict=False)
        planner.set_up_planner({name: self._empty(name) for name in names}, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return cast(StateDict, planner.state_dict)

    def _empty(self, name: str) -> Tensor | None:
        entry = self._metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype)


class _Files(FileSystem):
    """One checkpoint's directory, as DCP sees a file system."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage, self._directory = storage, directory

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with self._storage.open(self._directory, os.fspath(path)) as file:
            yield cast(io.IOBase, file)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix  # a name in the one directory there is


class _Planner(DefaultLoadPlanner):
    """Loads every tensor to the CPU, also those that were pickled on a GPU."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=False)
        cast(StateDict, self.state_dict)[read_item.dest_index.fqn] = loaded


def _put(root: StateDict, path: Path, value: object) -> None:
    node: Any = root
    for key, following in itertools.pairwise(path):
        if isinstance(node, list):
            while len(node) <= int(key):
                node.append({})
            node = node[int(key)]
        else:
            node = node.setdefault(key, [] if isinstance(following, int) else {})
    node[path[-1]] = value
