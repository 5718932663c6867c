"""Several replicas of a model in one process, in threads: scatter the batch, replicate the model, run, gather.

On GPUs this is torch's DataParallel. torch has none for CPUs, so this is the same scheme for them; autograd adds up the
gradients of the replicas. DDP is faster; see docs/parallel.md for how much and why.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.parallel.alone import OneProcess, save_without_prefix
from phalanx.system import cgroups
from phalanx.torch_compat import nn as private
from phalanx.torch_compat.tensors import Tree, tree_flatten, tree_unflatten

Call = tuple[tuple[Tree, ...], dict[str, Tree]]
"""The arguments of one replica."""


def default_count() -> int:
    """Returns one replica for each core that this process may use, but at least two."""
    return max(2, cgroups.core_affinity())


class Replicas(OneProcess):
    """``count`` replicas on the CPU. Batches are cut and put together along dimension 0.

    The first replica works on the model's own buffers, so BatchNorm's running statistics are those of its part of the
    batch, as with torch's DataParallel.
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        self.count = count if private.can_replicate() else 1
        save_without_prefix(self)

    def forward(self, *inputs: object, **kwargs: object) -> object:
        calls = scatter((inputs, kwargs), self.count)
        if len(calls) == 1:
            return self.module(*inputs, **kwargs)
        return gather(run(replicate(self.module, len(calls)), calls))


class GpuReplicas(OneProcess, nn.DataParallel[nn.Module]):
    """torch's DataParallel, with the interface and the state dict names of this package."""

    def __init__(self, module: nn.Module, gpus: Sequence[int | torch.device] | None) -> None:
        super().__init__(module, device_ids=gpus)
        save_without_prefix(self)


# ---- the four steps


def scatter(call: Call, count: int) -> list[Call]:
    """Returns the arguments of each replica: tensors cut along dimension 0, in any nesting; the rest unchanged.

    There are fewer than ``count`` when the batch is smaller, and one when there is no tensor to cut.
    """
    leaves, shape = tree_flatten(call)
    lengths = {leaf.shape[0] for leaf in leaves if _can_be_cut(leaf)}
    if not lengths:
        return [call]
    if len(lengths) > 1:
        found = ", ".join(map(str, sorted(lengths)))
        raise UsageError(
            f"the tensors given to the model have {found} rows, so they cannot be cut alike for {count} replicas; "
            "give all of them the batch as dimension 0."
        )
    pieces = [leaf.chunk(count) if _can_be_cut(leaf) else None for leaf in leaves]
    parts = max(len(piece) for piece in pieces if piece is not None)
    return [
        tree_unflatten(
            [leaf if piece is None else piece[part] for leaf, piece in zip(leaves, pieces, strict=True)], shape
        )
        for part in range(parts)
    ]


def _can_be_cut(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def replicate(model: nn.Module, count: int) -> list[nn.Module]:
    """Returns ``count`` copies of the model, as torch.nn.parallel.replicate does on GPUs.

    Gradients flow through the copies of the parameters back to the model; the first copy shares its memory.
    """
    copies = [_copies(model, first=number == 0) for number in range(count)]
    modules = list(model.modules())
    replicas = [{module: private.REPLICATE.of(module)() for module in modules} for _ in range(count)]
    for replica, copy in zip(replicas, copies, strict=True):
        for module in modules:
            _fill(module, replica, copy)
    return [replica[model] for replica in replicas]


def _copies(model: nn.Module, *, first: bool) -> dict[Tensor, Tensor]:
    """Copies each parameter and buffer once, so that the replica shares what the model shares."""
    found: dict[Tensor, Tensor] = {}
    for parameter in model.parameters():
        # Not the parameter itself: no replica has parameters of its own, and all should look alike.
        found[parameter] = parameter.view_as(parameter) if first else parameter.clone()
    for buffer in model.buffers():
        found[buffer] = buffer if first else buffer.detach().clone()
    return found


def _fill(module: nn.Module, replica: dict[nn.Module, nn.Module], copy: dict[Tensor, Tensor]) -> None:
    """Gives one module of a replica its children and its tensors."""
    target = replica[module]
    for name, child in private.CHILDREN.of(module).items():
        if child is None:
            private.CHILDREN.of(target)[name] = None
        else:
            setattr(target, name, replica[child])
    for name, parameter in private.PARAMETERS.of(module).items():
        if parameter is None:
            private.PARAMETERS.of(target)[name] = None
        else:  # a plain attribute: a copy is not a leaf of autograd's graph, so it cannot be a parameter
            setattr(target, name, copy[parameter])
    for name, buffer in private.BUFFERS.of(module).items():
        if buffer is not None:
            setattr(target, name, copy[buffer])


def run(replicas: Sequence[nn.Module], calls: Sequence[Call]) -> list[object]:
    """Runs each replica in a thread and returns the results; an exception is raised with the replica's number."""
    results: list[object] = [None] * len(calls)
    failures: dict[int, Callable[[], None]] = {}
    settings = _settings_of_this_thread()

    def work(number: int) -> None:
        try:
            inputs, kwargs = calls[number]
            with settings():
                results[number] = replicas[number](*inputs, **kwargs)
        except Exception:  # noqa: BLE001 (raised below)
            failures[number] = private.caught(f"in replica {number} of {len(calls)}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        failures[min(failures)]()
    return results


def _settings_of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """Returns a context manager that gives another thread torch's settings of this one."""
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        precision = torch.autocast("cpu", dtype, enabled=autocast, cache_enabled=cache)
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients), precision:
            yield

    return applied


def gather(outputs: Sequence[object]) -> Tree:
    """Joins the outputs: tensors along dimension 0, and scalars as a vector with one entry per replica."""
    flat, shapes = zip(*(tree_flatten(output) for output in outputs), strict=True)
    if any(shape != shapes[0] for shape in shapes):
        raise UsageError(
            f"the replicas returned results of different forms, such as {shapes[0]} and "
            f"{next(shape for shape in shapes if shape != shapes[0])}; return the same form from each part of a batch."
        )
    return tree_unflatten([_joined(each) for each in zip(*flat, strict=True)], shapes[0])


def _joined(values: Sequence[object]) -> object:
    first = values[0]
    if isinstance(first, Tensor):
        tensors = cast("Sequence[Tensor]", values)
        return torch.stack(list(tensors)) if first.dim() == 0 else torch.cat(list(tensors))
    if any(value is not first and value != first for value in values):
        raise UsageError(
            f"the replicas returned {', '.join(map(repr, values))}, which cannot be put together; return tensors."
        )
    return first
