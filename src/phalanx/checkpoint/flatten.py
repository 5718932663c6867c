"""A state as a flat list of named tensors and a tree of plain values.

Tensors of the model and the optimizer have the names that torch.distributed.checkpoint (DCP) gives them, so that plain
DCP code finds them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn

from phalanx.checkpoint.state import State, on_cpu
from phalanx.checkpoint.storage import values
from phalanx.checkpoint.storage.shard_file import dtype_name
from phalanx.checkpoint.storage.values import Path
from phalanx.errors import UsageError

_ALIKE = ("model", "optimizer")
"""Parts whose tensors have the same names and shapes on all ranks."""


@dataclass(frozen=True)
class Piece:
    """One tensor of a state."""

    name: str
    tensor: Tensor
    kind: Literal["shared", "buffer", "own"] = "own"
    """shared: equal on all ranks, bit for bit, so that any of them can write it. buffer: every rank has one, and rank 0
    writes its own. own: the rank that has it writes it, and the others know nothing of it."""
    is_late: bool = False
    """Nothing but an optimizer's step is going to change it, so that its copy may be made until then."""


@dataclass(frozen=True)
class Flat:
    """All of a state, as one rank saves it."""

    pieces: list[Piece]
    values: dict[str, Any]
    """What is no tensor, encoded; only rank 0's is saved."""
    rng: Any
    """The random generators of this rank, encoded."""


def flatten(state: State, rank: int, trust: bool) -> Flat:
    """Copies nothing but what is pickled; UsageError for what cannot be saved."""
    nested = state.state_dict()
    rng = nested.pop("rng")
    del nested["step"]  # the manifest has it
    keeper = _Keeper(state, rank, trust)
    try:
        encoded = {
            part: values.encode(content, (part,), keeper.keep)
            for part, content in nested.items()
            if rank == 0 or part in _ALIKE
        }
        return Flat(keeper.pieces, encoded, values.encode(rng, ("rng", rank), keeper.keep))
    except values.NotPlain as error:
        raise UsageError(
            f"{error}, and px.Checkpointer saves tensors and plain values; turn it into those, or give "
            "px.Checkpointer(…, trust=True), which pickles it: loading then runs code from the checkpoint."
        ) from None


class _Keeper:
    """Collects the tensors of a state, and gives each a name of its own."""

    def __init__(self, state: State, rank: int, trust: bool) -> None:
        self.pieces: list[Piece] = []
        self._names: set[str] = set()
        self._rank, self._trust = rank, trust
        self._parameters = state.parameters()
        stepped = _stepped(state.optimizer)
        self._has_steps, self._stepped = bool(stepped), stepped - _renormalized(state.model)

    def keep(self, path: Path, value: Any) -> tuple[Literal["tensor", "array", "pickle"], str] | None:
        if isinstance(value, Tensor) and type(value) not in values.TENSORS and path[0] in _ALIKE:
            raise UsageError(
                f"{'.'.join(map(str, path))} is a {type(value).__name__}, and px.Checkpointer saves plain tensors that "
                "all ranks have; save such a model with torch.distributed.checkpoint."
            )
        tensor = _plain(value)
        if tensor is None and not self._trust:
            return None
        name = self._name(path)
        if tensor is not None and isinstance(value, Tensor):
            piece = Piece(name, tensor, *self._kind(path, tensor))
        else:
            piece = Piece(name, _pickled(value) if tensor is None else tensor)
        if piece.kind != "own" or self._rank == 0 or path[0] == "rng":
            self.pieces.append(piece)
        return "pickle" if tensor is None else "array" if values.is_array(value) else "tensor", name

    def _kind(self, path: Path, tensor: Tensor) -> tuple[Literal["shared", "buffer", "own"], bool]:
        # Buffers, such as the averages of a BatchNorm, differ between the ranks; those of rank 0 are the ones that
        # DDP gives to all at the next step.
        on_host = tensor.device.type == "cpu" and not tensor.is_inference()
        if path[0] == "model" and len(path) == 2:
            parameter = self._parameters.get(path[1])
            if parameter is None:
                return "buffer", False
            return "shared", on_host and id(parameter) in self._stepped
        if path[:2] == ("optimizer", "state"):
            return "shared", on_host and self._has_steps
        return "own", False

    def _name(self, path: Path) -> str:
        plain = name = ".".join(map(str, path))
        number = 1
        while name in self._names:
            number += 1
            name = f"{plain}#{number}"
        self._names.add(name)
        return name


def _stepped(optimizer: Any) -> set[int]:
    """The parameters that only a step of this optimizer changes, as far as such a step can be held back."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return set()
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _renormalized(model: Any) -> set[int]:
    """The weights that forward changes: those of embeddings with ``max_norm``."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = (module for module in modules if getattr(module, "max_norm", None) is not None)
    return {id(parameter) for module in found for parameter in module.parameters(recurse=False)}


def _plain(value: Any) -> Tensor | None:
    """What a file of safetensors can hold; None for everything else."""
    if values.is_array(value):
        try:
            return _plain(torch.from_numpy(numpy.array(value)))
        except TypeError:  # a type that torch does not have
            return None
    if type(value) not in values.TENSORS or value.layout != torch.strided or value.is_quantized:
        return None
    return value.detach() if dtype_name(value.dtype) is not None else None


def _pickled(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(on_cpu(value), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpickled(content: Tensor) -> Any:
    """Runs whatever the pickle says."""
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=False)


def digest(pieces: Iterable[Piece]) -> str:
    """Equal on two ranks that are about to save the same things: names, types and shapes."""
    found = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        if piece.kind != "own":
            found.update(f"{piece.name} {piece.tensor.dtype} {tuple(piece.tensor.shape)} {piece.kind}\n".encode())
    return found.hexdigest()


def model_shapes(tree: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...] | None]:
    """The entries of the saved model's state dict; None for those that are no tensors."""
    model = tree.get("model", {})
    items = model["$ordered"][0] if "$ordered" in model else model.items()
    return {name: shapes.get(node.get("$tensor", "") if isinstance(node, dict) else "") for name, node in items}
