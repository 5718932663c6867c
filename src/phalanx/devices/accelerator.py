"""The accelerator of this process, through torch's own interface: CUDA, ROCm, XPU, Ascend's NPU, MPS, or none.

Only `choose` makes a device current. Nothing here initialises a device in a process that may still fork.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    import torch

_WITHOUT_INDEX = ("mps",)
"""Kinds of which a machine has one device, and torch knows no number for it."""


def kind() -> str | None:
    """The type of accelerator that torch can use here, such as ``cuda``; None on a machine with CPUs alone."""
    import torch

    interface = getattr(torch, "accelerator", None)
    if interface is None:  # before torch 2.6
        return "cuda" if torch.cuda.is_available() else None
    found = interface.current_accelerator()
    return found.type if found is not None and interface.is_available() else None


def module(device: torch.device | str) -> ModuleType:
    """torch.cuda, torch.xpu …: the functions of a kind of device."""
    import torch

    return torch.get_device_module(device)


def serves(device: torch.device) -> bool:
    """Whether a device is an accelerator: work on it is asynchronous, and has a queue of its own."""
    return device.type not in ("cpu", "meta")


def is_initialized(name: str) -> bool:
    """Whether this process has used the accelerator. Asking does not initialise it."""
    return bool(getattr(module(name), "is_initialized", lambda: True)())


def choose(asked: torch.device, local_rank: int, local_size: int) -> torch.device:
    """The device of a local rank, made current. ``asked`` names the kind, and may name the number."""
    import torch

    if not serves(asked):
        return asked
    here = kind()
    functions = module(asked) if asked.type == here else None
    count = functions.device_count() if functions is not None else 0
    if functions is None or (asked.index is not None and asked.index >= count):
        raise UsageError(f"device {asked} was asked for, but torch sees {count} GPU(s); use cpu, or free a GPU.")
    if asked.type in _WITHOUT_INDEX:
        return torch.device(asked.type)
    if asked.index is None and local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} of {local_size} has no GPU of its own: torch sees {count}; start at most {count} "
            "ranks on this node, or give px.init(device=…)."
        )
    index = asked.index if asked.index is not None else local_rank
    functions.set_device(index)
    return torch.device(asked.type, index)


def current(bound: torch.device | None) -> torch.device:
    """The device that the script itself has chosen. ``bound``: the one that its process group is bound to, if any.

    Without a sign of an accelerator in this process it is the CPU: nothing is initialised to find out.
    """
    import torch

    here = kind()
    if here is not None and is_initialized(here) and here not in _WITHOUT_INDEX:
        return torch.device(here, module(here).current_device())
    return bound if bound is not None else torch.device("cpu")


def default_backend(device: torch.device) -> str:
    """What torch.distributed is asked for: gloo for the CPU, and the accelerator's own beside it."""
    import torch.distributed as dist

    if not serves(device):
        return "gloo"
    find = getattr(dist, "get_default_backend_for_device", None)
    own = find(device) if find is not None else "nccl"
    return f"cpu:gloo,{device.type}:{own}"


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 by itself, not by emulation."""
    if not serves(device):
        return True
    ask = getattr(module(device), "is_bf16_supported", None)
    if ask is None:
        return False
    try:
        return bool(ask(including_emulation=False))
    except TypeError:  # before torch 2.5, and other kinds
        return bool(ask())


def rng_state(device: torch.device) -> torch.Tensor | None:
    return module(device).get_rng_state(*_argument(device)) if serves(device) else None


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    module(device).set_rng_state(state, *_argument(device))


def _argument(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type in _WITHOUT_INDEX else (device,)
