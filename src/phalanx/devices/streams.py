"""Streams and copies of an accelerator, through torch's own interface: torch.cuda, torch.xpu, torch.npu."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from phalanx.devices import accelerator

if TYPE_CHECKING:
    import torch

Stream = Any
"""A torch.cuda.Stream, or the class of another kind of device with the same methods."""


def beside_kernels(device: torch.device) -> Stream | None:
    """A new stream for copies; None on CPUs, and on devices that have one queue for everything."""
    make = getattr(accelerator.module(device), "Stream", None) if accelerator.serves(device) else None
    return None if make is None else make(device)


def current(device: torch.device) -> Stream:
    """The stream of the kernels that are launched now."""
    return accelerator.module(device).current_stream(device)


def within(stream: Stream, device: torch.device) -> AbstractContextManager[object]:
    """A block whose copies and kernels go to the stream."""
    return accelerator.module(device).stream(stream)


def recorded_event(device: torch.device) -> Any:
    """An event after all that was launched on the device so far; its ``synchronize()`` waits for that alone."""
    functions = accelerator.module(device)
    try:
        event = functions.Event(blocking=True)  # sleeps; the default spins on a core
    except TypeError:  # kinds that have no choice
        event = functions.Event()
    event.record(*([current(device)] if hasattr(functions, "current_stream") else []))
    return event


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """Bytes of host memory that the device copies to by itself, or plain ones where the kind of device has none.

    CUDA registers memory of exactly this size: what torch pins is rounded up to a power of two. Whoever takes a part of
    it keeps the whole.
    """
    import torch

    cudart = getattr(accelerator.module(device), "cudart", None)
    if cudart is None:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except (NotImplementedError, RuntimeError):
            return torch.empty(size, dtype=torch.uint8)
    memory = torch.empty(size, dtype=torch.uint8)
    if code := int(cudart().cudaHostRegister(memory.data_ptr(), size, 0)):
        raise RuntimeError(f"CUDA cannot pin {size} bytes of host memory: cudaHostRegister returned {code}")
    weakref.finalize(memory, cudart().cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
