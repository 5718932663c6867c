"""Streams of an accelerator, through torch's own interface: torch.cuda, torch.xpu, torch.npu."""

from __future__ import annotations

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
