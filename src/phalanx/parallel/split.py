"""Puts the parts of a model on several devices of one process.

A part is a submodule. Its inputs are moved to its device before it runs; its outputs stay there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from phalanx import argparser
from phalanx.devices import accelerator
from phalanx.errors import UsageError
from phalanx.torch_compat.tensors import tree_map_only

Device = str | int | torch.device


def split(model: nn.Module, parts: Mapping[str, Device] | None, devices: object) -> nn.Module:
    """Moves the parts of a model to their devices, in place."""
    found = {name: _device(device) for name, device in (parts or balanced(model, devices)).items()}
    _check(model, found)
    for name, device in found.items():
        part = model.get_submodule(name)
        part.to(device)
        part.register_forward_pre_hook(functools.partial(_move_inputs, device), with_kwargs=True)
    return model


def _move_inputs(
    device: torch.device, _: nn.Module, inputs: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), (inputs, kwargs))


def _device(given: Device) -> torch.device:
    device = argparser.device(given)
    if accelerator.serves(device) and (device.index or 0) >= (count := accelerator.module(device).device_count()):
        raise UsageError(f"a part is to go to {device}, but torch sees {count} GPU(s).")
    return device


# ---- which part of the model goes where


def _check(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Checks that every parameter and buffer belongs to one part, or to two on the same device."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name in devices:
        try:
            model.get_submodule(name)
        except AttributeError:
            there = ", ".join(child for child, _ in model.named_children())
            raise UsageError(f"parts names {name!r}, which the model does not have; it has {there}.") from None
    where: dict[Tensor, tuple[str, torch.device]] = {}
    for name, tensor in named:
        holders = [part for part in devices if part == "" or name.startswith(f"{part}.")]
        if len(holders) > 1:
            raise UsageError(f"{name} is in the parts {' and '.join(holders)}; name only one of them in parts.")
        if not holders:
            raise UsageError(f"{name} is in no part; parts has {', '.join(devices)}, add the one that holds it.")
        device = devices[holders[0]]
        other, elsewhere = where.setdefault(tensor, (name, device))
        if elsewhere != device:
            raise UsageError(
                f"{other} and {name} are one tensor, but their parts go to {elsewhere} and {device}; "
                "put them on one device."
            )


def balanced(model: nn.Module, devices: object) -> dict[str, Device]:
    """Assigns the layers of a Sequential to ``devices``, in order; the largest share of bytes is minimal."""
    if not isinstance(model, nn.Sequential):
        raise UsageError(
            f"a {type(model).__name__} can only be split by names: give parts={{'its submodule': 'cuda:0', …}}; "
            "devices=[…] is for an nn.Sequential."
        )
    if not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        raise UsageError(f"devices is {devices!r}; give the list of devices that the Sequential goes to, or parts.")
    layers = dict(model.named_children())
    if len(layers) < len(devices):
        raise UsageError(f"a Sequential of {len(layers)} layers cannot be split over {len(devices)} devices.")
    sizes = [_bytes(layer) for layer in layers.values()]
    ends = cuts(sizes, len(devices))
    owners = [device for device, start, end in zip(devices, [0, *ends], ends, strict=False) for _ in range(start, end)]
    return dict(zip(layers, owners, strict=True))


def _bytes(layer: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())


def cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns where each of ``parts`` runs of ``sizes`` ends, none of them empty; the largest sum is minimal.

    By bisection over that sum: filling one part after the other shows whether a limit can be kept.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        if len(_fill(sizes, limit, 1)) <= parts:
            high = limit
        else:
            low = limit + 1
    return _fill(sizes, low, parts)


def _fill(sizes: Sequence[int], limit: int, parts: int) -> list[int]:
    """Returns the ends of runs that keep the limit: ``parts`` of them, also where fewer would do."""
    ends: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        # There are as many layers left as parts: each gets one.
        short = len(sizes) - index == parts - len(ends) - 1
        if index and (filled + size > limit or short):
            ends.append(index)
            filled = 0
        filled += size
    return [*ends, len(sizes)]
