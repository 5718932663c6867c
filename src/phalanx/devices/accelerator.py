"""The accelerator of this process, through torch's own interface: CUDA, ROCm, XPU, Ascend's NPU, MPS, or none.

Only `choose` makes a device current. Nothing here initialises a device in a process that may still fork.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError

if TYPE_CHECKING:
    import torch

_WITHOUT_INDEX = ("mps",)
"""Kinds of which a machine has one device, and torch knows no number for it."""


def built_for() -> str | None:
    """The type of accelerator that torch was built for, such as ``cuda``; there need not be a device."""
    import torch

    interface = getattr(torch, "accelerator", None)
    if interface is None:  # before torch 2.6
        return "cuda" if torch.version.cuda or torch.version.hip else None
    found = interface.current_accelerator()
    return None if found is None else found.type


def kind() -> str | None:
    """The type of accelerator that torch can use here; None on a machine with CPUs alone.

    torch counts NVIDIA's GPUs through NVML; is_available() would initialise CUDA, and no child could use it then.
    """
    name = built_for()
    return name if name is not None and module(name).device_count() > 0 else None


def module(device: torch.device | str) -> ModuleType:
    """torch.cuda, torch.xpu …: the functions of a kind of device."""
    import torch

    return torch.get_device_module(device)


def serves(device: torch.device) -> bool:
    """Whether a device is an accelerator: work on it is asynchronous, and has a queue of its own."""
    return device.type not in ("cpu", "meta")


def choose(asked: torch.device | None, local_rank: int, world_size: int) -> torch.device:
    """The device of a local rank, made current. ``asked`` names the kind and may name the number; None: any."""
    import torch

    here = kind() if asked is None or serves(asked) else None
    if here is not None and not getattr(module(here), "is_available", lambda: True)():  # a driver too old for torch
        here = None
    if asked is None:
        asked = torch.device("cpu" if here is None or (here in _WITHOUT_INDEX and world_size > 1) else here)
    if not serves(asked):
        return asked
    count = module(asked).device_count() if asked.type == here else 0
    if (asked.index or 0) >= count:
        how = "use cpu, free a GPU, or install a torch that is built for it"
        raise UsageError(f"device {asked} was asked for, but torch sees {count} GPU(s); {how}.")
    if asked.type in _WITHOUT_INDEX:
        if world_size > 1:
            raise UsageError(f"device {asked.type} is for one process, and there are {world_size}; use cpu.")
        return torch.device(asked.type)
    # Launchers such as SLURM may show each rank one device alone: its own.
    index = asked.index if asked.index is not None else local_rank % count
    module(asked).set_device(index)
    return torch.device(asked.type, index)


def current(bound: torch.device | None) -> torch.device:
    """The device that the script itself has chosen. ``bound``: the one that its process group is bound to, if any.

    Without a sign of an accelerator in this process it is the CPU: nothing is initialised to find out.
    """
    import torch

    name = built_for()
    if name is not None and name not in _WITHOUT_INDEX and getattr(module(name), "is_initialized", lambda: True)():
        return torch.device(name, module(name).current_device())
    return bound if bound is not None else torch.device("cpu")


def identity(device: torch.device) -> str:
    """What tells a device from all others; empty where the driver has no such number, and for a part of a GPU."""
    found = getattr(module(device), "get_device_properties", lambda _: None)(device)
    is_part = "MIG" in getattr(found, "name", "")  # may have the number of the whole GPU
    return "" if is_part else str(getattr(found, "uuid", ""))


def default_backend(device: torch.device) -> str:
    """What torch.distributed is asked for: gloo for the CPU, and the accelerator's own beside it."""
    import torch.distributed as dist

    find = getattr(dist, "get_default_backend_for_device", lambda of: "nccl" if serves(of) else "gloo")
    try:
        own = find(device)
    except ValueError:
        raise UsageError(f"torch has no backend for {device.type}; import the package that brings it.") from None
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def own_backend(backend: str, device: torch.device) -> str | None:
    """The accelerator's own among the backends of a group, such as nccl; None if the device has none there.

    ``backend``: a name, or ``cpu:gloo,cuda:nccl``.
    """
    parts = [pair.rpartition(":") for pair in backend.split(",")]
    own = next((name for kind, _, name in parts if kind in (device.type, "")), None)
    return own if serves(device) and own not in (None, "gloo", "mpi", "shm", "undefined") else None


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


def copy_stream(device: torch.device) -> Any | None:
    """A new stream for copies beside the kernels; None on CPUs, and where a device has one queue for everything."""
    make = getattr(module(device), "Stream", None) if serves(device) else None
    return None if make is None else make(device)


def recorded_event(device: torch.device) -> Any:
    """An event after all that was launched on the device so far; its ``synchronize()`` waits for that alone."""
    functions = module(device)
    event = functions.Event()
    event.record(*([functions.current_stream(device)] if hasattr(functions, "current_stream") else []))
    return event


def host_memory(size: int, device: torch.device | None) -> torch.Tensor:
    """Bytes on the host, pinned for copies from CUDA and ROCm. Whoever takes a part of it keeps the whole.

    It is registered in its own size: what torch itself pins is rounded up to a power of two.
    """
    import torch

    memory = torch.empty(size, dtype=torch.uint8)
    cudart = None if device is None else getattr(module(device), "cudart", None)
    if cudart is not None:
        if code := int(cudart().cudaHostRegister(memory.data_ptr(), size, 0)):
            raise RuntimeError(f"CUDA cannot pin {size} bytes of host memory: cudaHostRegister returned {code}")
        weakref.finalize(memory, cudart().cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
