"""Flattens a state into a list of named tensors and a tree of plain values.

Tensors of the model and the optimizer have the names that torch.distributed.checkpoint (DCP) gives them, so that plain
DCP code finds them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
from torch import Tensor, nn

from phalanx.checkpoint.state import State, on_cpu
from phalanx.checkpoint.storage import values
from phalanx.checkpoint.storage.manifest import Encoded
from phalanx.checkpoint.storage.shard_file import DTYPE_NAMES
from phalanx.checkpoint.storage.values import Path
from phalanx.errors import UsageError

_REPLICATED = ("model", "optimizer")
"""Parts whose tensors have the same names and shapes on all ranks."""


Kind = Literal["shared", "buffer", "own"]
"""shared: equal on all ranks, bit for bit, so that any of them can write it. buffer: every rank has one, and rank 0
writes its own. own: only this rank has it, and writes it."""


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of a state."""

    name: str
    tensor: Tensor
    kind: Kind = "own"
    copy_later: bool = False
    """Only an optimizer's step changes it, so that it may be copied until then."""


@dataclass(frozen=True)
class Flat:
    """A whole state, as one rank saves it."""

    tensors: list[NamedTensor]
    values: dict[str, Encoded]
    """All other values; only those of rank 0 are saved."""
    rng: Encoded
    """The random number generators of this rank."""


def flatten(state: State, rank: int, trust: bool) -> Flat:
    """Copies only what it pickles. Raises UsageError for a value that cannot be saved."""
    nested = state.state_dict()
    rng = nested.pop("rng")
    del nested["step"]  # the manifest has it
    collector = _TensorCollector(state, rank, trust)
    try:
        encoded = {
            part: values.encode(content, (part,), collector.keep)
            for part, content in nested.items()
            if rank == 0 or part in _REPLICATED
        }
        return Flat(collector.tensors, encoded, values.encode(rng, ("rng", rank), collector.keep))
    except values.NotPlain as error:
        raise UsageError(
            f"{error}, and px.Checkpointer saves tensors and plain values; turn it into those, or give "
            "px.Checkpointer(…, trust=True), which pickles it: loading then runs code from the checkpoint."
        ) from None


class _TensorCollector:
    """Collects the tensors of a state, and gives each a name of its own."""

    def __init__(self, state: State, rank: int, trust: bool) -> None:
        self.tensors: list[NamedTensor] = []
        self._names: set[str] = set()
        self._rank, self._trust = rank, trust
        self._parameters = state.parameters()
        stepped = _stepped(state.optimizer)
        self._has_steps, self._stepped = bool(stepped), stepped - _renormalized(state.model)

    def keep(self, path: Path, value: object) -> tuple[Literal["tensor", "array", "pickle"], str] | None:
        if isinstance(value, Tensor) and type(value) not in values.TENSORS and path[0] in _REPLICATED:
            raise UsageError(
                f"{'.'.join(map(str, path))} is a {type(value).__name__}, and px.Checkpointer saves plain tensors that "
                "all ranks have; save such a model with torch.distributed.checkpoint."
            )
        tensor = _plain(value)
        if tensor is None and not self._trust:
            return None
        name = self._name(path)
        if tensor is not None and isinstance(value, Tensor):
            named = NamedTensor(name, tensor, *self._kind(path, tensor))
        else:
            named = NamedTensor(name, _pickled(value) if tensor is None else tensor)
        if named.kind != "own" or self._rank == 0 or path[0] == "rng":
            self.tensors.append(named)
        return "pickle" if tensor is None else "array" if values.is_array(value) else "tensor", name

    def _kind(self, path: Path, tensor: Tensor) -> tuple[Kind, bool]:
        # Buffers, such as the averages of a BatchNorm, differ between the ranks; those of rank 0 are the ones that
        # DDP gives to all at the next step.
        on_host = tensor.device.type == "cpu" and not tensor.is_inference()
        if path[0] == "model" and len(path) == 2:
            parameter = self._parameters.get(str(path[1]))
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


def _stepped(optimizer: object) -> set[int]:
    """Returns the ids of the parameters that only a step of this optimizer changes, if such a step can be delayed."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return set()
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _renormalized(model: object) -> set[int]:
    """Returns the ids of the weights that forward changes: those of embeddings with ``max_norm``."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = (module for module in modules if getattr(module, "max_norm", None) is not None)
    return {id(parameter) for module in found for parameter in module.parameters(recurse=False)}


def _plain(value: object) -> Tensor | None:
    """Returns a tensor that a safetensors file can hold; None for everything else."""
    if values.is_array(value):
        try:
            return _plain(torch.from_numpy(numpy.array(value)))
        except TypeError:  # a type that torch does not have
            return None
    if not isinstance(value, Tensor) or type(value) not in values.TENSORS:
        return None
    is_plain = value.layout == torch.strided and not value.is_quantized and value.dtype in DTYPE_NAMES
    return value.detach() if is_plain else None


def _pickled(value: object) -> Tensor:
    buffer = io.BytesIO()
    torch.save(on_cpu(value), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpickle(content: Tensor) -> object:
    """Runs whatever code the pickle holds."""
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=False)


def digest(tensors: Iterable[NamedTensor]) -> str:
    """Hashes names, types and shapes: two ranks can save together if theirs are equal."""
    found = hashlib.blake2b(digest_size=8)
    for named in tensors:
        if named.kind != "own":
            found.update(f"{named.name} {named.tensor.dtype} {tuple(named.tensor.shape)} {named.kind}\n".encode())
    return found.hexdigest()


def model_shapes(
    tree: Mapping[str, Encoded], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...] | None]:
    """Returns the shape of each entry of the saved model's state dict; None for those that are no tensors."""
    model = tree.get("model", {})
    items = model["$ordered"][0] if "$ordered" in model else model.items()
    return {name: shapes.get(node.get("$tensor", "") if isinstance(node, dict) else "") for name, node in items}
