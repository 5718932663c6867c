"""From a checkpoint to a state: does it fit, read it, hand it over. Nothing is changed before all of it was read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from phalanx.checkpoint import dice, optimizers
from phalanx.checkpoint.files import read_metadata, read_values
from phalanx.checkpoint.layout import nested, random_name
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.place import Place
from phalanx.checkpoint.shelf import Entry
from phalanx.checkpoint.state import State, unwrapped
from phalanx.errors import CheckpointError
from phalanx.world import World

_SHOWN = 3


class Loaded:
    """The content of a checkpoint in memory, as far as ``state`` wants it."""

    def __init__(self, place: Place, entry: Entry, state: State, world: World) -> None:
        assert entry.manifest is not None
        self._manifest: Manifest = entry.manifest
        self._world = world
        metadata = read_metadata(place, entry.directory)
        _check_fit(f"step {entry.step} in {place}", self._manifest, metadata, state)
        self._values = read_values(place, entry.directory, metadata, self._wanted(metadata, state))
        self._nested = nested(self._values, metadata.planner_data)
        if state.optimizer is not None:
            optimizers.check(state.optimizer, self._nested["optimizer"])

    def _wanted(self, metadata: Metadata, state: State) -> list[str]:
        heads = {"step", *state.parts, "extra"}
        names = [name for name in metadata.state_dict_metadata if metadata.planner_data[name][0] in heads]
        return [*names, random_name(self._world.rank if self._is_same_size else 0)]

    @property
    def _is_same_size(self) -> bool:
        return self._manifest.world_size == self._world.size

    def hand_over(self, state: State) -> None:
        state.load_state_dict({name: value for name, value in self._nested.items() if name != "rng"})
        rank, size, device = self._world.rank, self._world.size, self._world.device
        if self._is_same_size:
            own = self._values[random_name(rank)]
            state.set_random(lambda: dice.give_back(own, device))
        else:
            first = self._values[random_name(0)]
            state.set_random(lambda: dice.draw_anew(first, rank, size))


def _check_fit(where: str, manifest: Manifest, metadata: Metadata, state: State) -> None:
    """Raises CheckpointError with names and shapes."""
    missing = [part for part in state.parts if part not in manifest.parts and part != "extra"]
    if missing:
        raise CheckpointError(
            f"{where} has no {' and no '.join(missing)}; it was saved with {', '.join(manifest.parts) or 'nothing'}."
        )
    if state.model is None:
        return
    saved = {
        name.removeprefix("model."): entry
        for name, entry in metadata.state_dict_metadata.items()
        if metadata.planner_data[name][0] == "model"
    }
    found = _misfits(saved, unwrapped(state.model).state_dict())
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(f"{where} does not fit the model: {'; '.join(found[:_SHOWN])}{more}.")


def _misfits(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    found = [f"{name} is not in the checkpoint" for name in own if name not in saved]
    found += [f"{name} is not in the model" for name in saved if name not in own]
    for name, value in own.items():
        entry = saved.get(name)
        if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            found.append(
                f"{name} has shape {tuple(entry.size)} in the checkpoint and {tuple(value.shape)} in the model"
            )
    return found
