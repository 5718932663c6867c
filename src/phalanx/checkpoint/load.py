"""Loading a checkpoint: check that it fits, read it, apply it. Nothing is changed before all of it was read."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from phalanx.checkpoint import flatten, optimizers, rng_state
from phalanx.checkpoint.catalog import Entry
from phalanx.checkpoint.state import State, unwrapped
from phalanx.checkpoint.storage.base import Storage
from phalanx.checkpoint.storage.manifest import LEGACY, Broken, Manifest
from phalanx.checkpoint.storage.shard_file import ShardReader
from phalanx.checkpoint.storage.values import Decoder, StateDict
from phalanx.errors import CheckpointError
from phalanx.world import World

if TYPE_CHECKING:
    from phalanx.checkpoint.storage.legacy import LegacyCheckpoint

    Content: TypeAlias = "_ShardedContent | LegacyCheckpoint"

_MISMATCHES_SHOWN = 3
_TRUST = "Give trust=True, to px.Checkpointer or as --trust, if you trust whoever wrote it."


def open_content(storage: Storage, entry: Entry, trust: bool) -> Content:
    """Raises CheckpointError if reading it would run code, and ``trust`` does not allow that."""
    assert entry.manifest is not None
    if entry.manifest.version != LEGACY:
        return _ShardedContent(storage, entry.directory, entry.manifest, trust)
    if not trust:
        raise CheckpointError(
            f"{entry.directory} in {storage} was written by phalanx {entry.manifest.phalanx} as pickles, and loading "
            f"it runs code from it. {_TRUST}"
        )
    from phalanx.checkpoint.storage.legacy import LegacyCheckpoint

    return LegacyCheckpoint(storage, entry.directory)


class _NotTrusted(CheckpointError):
    """Reading a value would run code."""


class _ShardedContent:
    """The content of one checkpoint; `LegacyCheckpoint` has the same methods."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest, trust: bool) -> None:
        self._storage, self._directory, self._manifest, self._trust = storage, directory, manifest, trust

    @property
    def model_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """The entries of the model's state dict, with the shapes of those that are tensors."""
        shapes = {name: each.shape for name, each in self._manifest.tensors.items()}
        try:
            return flatten.model_shapes(self._manifest.values, shapes)
        except (TypeError, ValueError, LookupError, AttributeError):
            raise Broken("its values are damaged") from None

    def read(self, parts: set[str], rank: int) -> tuple[StateDict, object]:
        """Returns these parts, as `State.load_state_dict` takes them, and the random generators of a rank.

        ``extra`` is read in any case, unless that would run code.
        """
        manifest = self._manifest
        with ShardReader(self._storage, self._directory, manifest) as shards:
            decoder = Decoder(shards.read, self._unpickle)
            nested = {part: decoder.decode(node) for part, node in manifest.values.items() if part in parts}
            if "extra" in manifest.values.keys() - parts:
                with contextlib.suppress(_NotTrusted):
                    nested["extra"] = decoder.decode(manifest.values["extra"])
            return {**nested, "step": manifest.step}, decoder.decode(manifest.rng[rank])

    def _unpickle(self, content: Tensor) -> object:
        if not self._trust:
            raise _NotTrusted(
                f"{self._directory} in {self._storage} has objects that were pickled, and loading them runs code from "
                f"it. {_TRUST}"
            )
        return flatten.unpickle(content)


def prepare(storage: Storage, entry: Entry, state: State, world: World, trust: bool) -> Callable[[], None]:
    """Reads a checkpoint, as far as ``state`` needs it, and returns a function that loads it into ``state``."""
    assert entry.manifest is not None
    has_same_size = entry.manifest.world_size == world.size
    content = open_content(storage, entry, trust)
    _check_fit(f"step {entry.step} in {storage}", entry.manifest, content, state)
    nested, generators = content.read({*state.parts}, world.rank if has_same_size else 0)
    rng = rng_state.check(generators)
    if not isinstance(nested.get("extra", {}), dict):
        raise Broken("its values are damaged")
    if state.optimizer is not None:
        optimizers.check_form(nested.get("optimizer"))
        optimizers.check(state.optimizer, nested["optimizer"])

    def apply() -> None:
        state.load_state_dict(nested)
        if has_same_size:
            state.restore_random(lambda: rng_state.restore(rng, world.device))
        else:
            state.restore_random(lambda: rng_state.reseed(rng, world.rank, world.size))

    return apply


def _check_fit(where: str, manifest: Manifest, content: Content, state: State) -> None:
    """Raises CheckpointError, with names and shapes."""
    missing = [part for part in state.parts if part not in manifest.parts and part != "extra"]
    if missing:
        raise CheckpointError(
            f"{where} has no {' and no '.join(missing)}; it was saved with {', '.join(manifest.parts) or 'nothing'}."
        )
    if state.model is None:
        return
    found = _mismatches(content.model_shapes, unwrapped(state.model).state_dict())
    if found:
        left = len(found) - _MISMATCHES_SHOWN
        more = f"; and {left} more" if left > 0 else ""
        raise CheckpointError(f"{where} does not fit the model: {'; '.join(found[:_MISMATCHES_SHOWN])}{more}.")


def _mismatches(saved: Mapping[str, tuple[int, ...] | None], own: Mapping[str, object]) -> list[str]:
    found = [f"{name} is not in the checkpoint" for name in own if name not in saved]
    found += [f"{name} is not in the model" for name in saved if name not in own]
    for name, value in own.items():
        shape = saved.get(name)
        if isinstance(value, Tensor) and shape is not None and shape != tuple(value.shape):
            found.append(f"{name} has shape {shape} in the checkpoint and {tuple(value.shape)} in the model")
    return found


def export(storage: Storage, entry: Entry, out: Path, trust: bool) -> int:
    """Writes the tensors of the model, under their own names, to one safetensors file; returns how many."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        nested, _ = open_content(storage, entry, trust).read({"model"}, 0)
    except Broken as error:
        raise CheckpointError(f"{entry.directory} in {storage} is damaged: {error}.") from None
    tensors = {name: value for name, value in nested.get("model", {}).items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{entry.directory} in {storage} has no model to export; it was saved without one.")
    temporary = out.with_name(f".{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        save_file(tensors, temporary, metadata={"format": "pt", "step": str(entry.step)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}.") from None
    finally:
        temporary.unlink(missing_ok=True)
    return len(tensors)
