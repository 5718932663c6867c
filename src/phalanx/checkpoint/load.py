"""From a checkpoint to a state: does it fit, read it, hand it over. Nothing is changed before all of it was read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from phalanx.checkpoint import flatten, optimizers, rng_state
from phalanx.checkpoint.catalog import Entry
from phalanx.checkpoint.state import State, unwrapped
from phalanx.checkpoint.storage.base import Storage
from phalanx.checkpoint.storage.manifest import LEGACY, Broken, Manifest
from phalanx.checkpoint.storage.shard_file import Shards
from phalanx.checkpoint.storage.values import Decoder
from phalanx.errors import CheckpointError
from phalanx.world import World

_SHOWN = 3
_TRUST = "Give trust=True, to px.Checkpointer or as --trust, if you trust whoever wrote it."


class Content(Protocol):
    """What one checkpoint holds, whatever its form."""

    @property
    def model(self) -> dict[str, tuple[int, ...] | None]:
        """The entries of the model's state dict, with the shapes of those that are tensors."""
        ...

    def read(self, parts: set[str], rank: int) -> tuple[dict[str, Any], Any]:
        """Those parts, as `State.load_state_dict` takes them, and the random generators of a rank.

        ``extra`` comes along although it was not asked for, unless that would run code."""
        ...


def open_content(place: Storage, entry: Entry, trust: bool) -> Content:
    """CheckpointError if reading it would run code, and that is not wanted."""
    assert entry.manifest is not None
    if entry.manifest.version != LEGACY:
        return _Sharded(place, entry.directory, entry.manifest, trust)
    if not trust:
        raise CheckpointError(
            f"{entry.directory} in {place} was written by phalanx {entry.manifest.phalanx} as pickles, and loading it "
            f"runs code from it. {_TRUST}"
        )
    from phalanx.checkpoint.storage.legacy import Legacy

    return Legacy(place, entry.directory)


class _NotTrusted(CheckpointError):
    """Reading a value would run code."""


class _Sharded:
    def __init__(self, place: Storage, directory: str, manifest: Manifest, trust: bool) -> None:
        self._place, self._directory, self._manifest, self._trust = place, directory, manifest, trust

    @property
    def model(self) -> dict[str, tuple[int, ...] | None]:
        shapes = {name: each.shape for name, each in self._manifest.tensors.items()}
        try:
            return flatten.model_shapes(self._manifest.values, shapes)
        except (TypeError, ValueError, LookupError, AttributeError):
            raise Broken("its values are damaged") from None

    def read(self, parts: set[str], rank: int) -> tuple[dict[str, Any], Any]:
        manifest = self._manifest
        with Shards(self._place, self._directory, manifest) as shards:
            decoder = Decoder(shards.read, self._unpickled)
            nested = {part: decoder.decode(node) for part, node in manifest.values.items() if part in parts}
            if "extra" in manifest.values.keys() - parts:
                with contextlib.suppress(_NotTrusted):
                    nested["extra"] = decoder.decode(manifest.values["extra"])
            return {**nested, "step": manifest.step}, decoder.decode(manifest.rng[rank])

    def _unpickled(self, content: Tensor) -> Any:
        if not self._trust:
            raise _NotTrusted(
                f"{self._directory} in {self._place} has objects that were pickled, and loading them runs code from "
                f"it. {_TRUST}"
            )
        return flatten.unpickled(content)


class Loaded:
    """The content of a checkpoint in memory, as far as ``state`` wants it."""

    def __init__(self, place: Storage, entry: Entry, state: State, world: World, trust: bool) -> None:
        assert entry.manifest is not None
        self._world = world
        self._is_same_size = entry.manifest.world_size == world.size
        content = open_content(place, entry, trust)
        _check_fit(f"step {entry.step} in {place}", entry.manifest, content, state)
        self._nested, self._rng = content.read({*state.parts}, world.rank if self._is_same_size else 0)
        rng_state.check(self._rng)
        if not isinstance(self._nested.get("extra", {}), dict):
            raise Broken("its values are damaged")
        if state.optimizer is not None:
            optimizers.check_form(self._nested.get("optimizer"))
            optimizers.check(state.optimizer, self._nested["optimizer"])

    def hand_over(self, state: State) -> None:
        state.load_state_dict(self._nested)
        rank, size, device, rng = self._world.rank, self._world.size, self._world.device, self._rng
        if self._is_same_size:
            state.set_random(lambda: rng_state.give_back(rng, device))
        else:
            state.set_random(lambda: rng_state.draw_anew(rng, rank, size))


def _check_fit(where: str, manifest: Manifest, content: Content, state: State) -> None:
    """Raises CheckpointError with names and shapes."""
    missing = [part for part in state.parts if part not in manifest.parts and part != "extra"]
    if missing:
        raise CheckpointError(
            f"{where} has no {' and no '.join(missing)}; it was saved with {', '.join(manifest.parts) or 'nothing'}."
        )
    if state.model is None:
        return
    found = _misfits(content.model, unwrapped(state.model).state_dict())
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(f"{where} does not fit the model: {'; '.join(found[:_SHOWN])}{more}.")


def _misfits(saved: Mapping[str, tuple[int, ...] | None], own: Mapping[str, Any]) -> list[str]:
    found = [f"{name} is not in the checkpoint" for name in own if name not in saved]
    found += [f"{name} is not in the model" for name in saved if name not in own]
    for name, value in own.items():
        shape = saved.get(name)
        if isinstance(value, Tensor) and shape is not None and shape != tuple(value.shape):
            found.append(f"{name} has shape {shape} in the checkpoint and {tuple(value.shape)} in the model")
    return found
