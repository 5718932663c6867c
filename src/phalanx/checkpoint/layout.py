"""A state as a flat list of named values, the way torch.distributed.checkpoint (DCP) stores one, and back.

Tensors of the model and the optimizer are stored one by one, under the names that DCP's own flattening gives them, so
that plain DCP code finds them. The other parts are stored whole: DCP would turn the keys of their dicts into strings.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.state import State, on_cpu
from phalanx.errors import UsageError

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Piece:
    """One value of a state."""

    path: Path
    value: Any
    """A tensor, or anything that can be pickled."""
    is_shared: bool = False
    """Equal on all ranks, bit for bit, so that any of them can write it. The others are rank 0's."""

    @property
    def tensor(self) -> Tensor | None:
        """None for what is pickled whole."""
        value = self.value
        is_plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
        return value if is_plain else None

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


def random_name(rank: int) -> str:
    return f"rng.{rank}"


def pieces_of(state: State) -> tuple[list[Piece], Any]:
    """All of a state but for the random numbers, and those of this rank."""
    nested = state.state_dict()
    parameters = state.parameters()
    rng = nested.pop("rng")
    pieces = [Piece(("step",), nested["step"])]
    for name, value in nested.get("model", {}).items():
        # Buffers, such as the averages of a BatchNorm, differ between the ranks; those of rank 0 are the ones that
        # DDP gives to all at the next step.
        pieces.append(_piece(("model", name), value, is_shared=name in parameters))
    if "optimizer" in nested:
        pieces += _of_optimizer(nested["optimizer"])
    pieces += [Piece((part,), on_cpu(nested[part])) for part in ("scheduler", "sampler", "extra") if part in nested]
    return pieces, rng


def _of_optimizer(state: Mapping[str, Any]) -> Iterator[Piece]:
    for name, values in state["state"].items():
        if not isinstance(values, Mapping):
            yield _piece(("optimizer", "state", name), values, is_shared=True)
            continue
        for key, value in values.items():
            yield _piece(("optimizer", "state", name, key), value, is_shared=True)
    for number, group in enumerate(state["param_groups"]):
        for key, value in group.items():
            yield Piece(("optimizer", "param_groups", number, key), on_cpu(value))


def _piece(path: Path, value: Any, is_shared: bool) -> Piece:
    if not isinstance(value, Tensor):
        return Piece(path, on_cpu(value))
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise UsageError(
            f"{'.'.join(map(str, path))} is a {type(value).__name__}, and px.Checkpointer saves plain tensors that all "
            "ranks have; save such a model with torch.distributed.checkpoint."
        )
    piece = Piece(path, value.detach(), is_shared)
    return piece if piece.tensor is not None else Piece(path, on_cpu(value))


def digest(pieces: Iterable[Piece]) -> str:
    """Equal on two ranks that are about to save the same things: names, types and shapes."""
    found = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        tensor = piece.tensor
        kind = f"{tensor.dtype} {tuple(tensor.shape)}" if tensor is not None else "object"
        found.update(f"{piece.name} {kind} {piece.is_shared}\n".encode())
    return found.hexdigest()


def nested(values: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """What `State.load_state_dict` takes, from what was read."""
    root: dict[str, Any] = {"optimizer": {"state": {}, "param_groups": []}}
    for name, value in values.items():
        _put(root, paths[name], value)
    if not root["optimizer"]["param_groups"]:
        del root["optimizer"]
    return root


def _put(root: dict[str, Any], path: Path, value: Any) -> None:
    place: Any = root
    for key, following in itertools.pairwise(path):
        if isinstance(place, list):
            while len(place) <= int(key):
                place.append({})
            place = place[int(key)]
        else:
            place = place.setdefault(key, [] if isinstance(following, int) else {})
    place[path[-1]] = value
