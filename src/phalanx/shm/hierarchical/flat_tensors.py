"""Tensors as the network sees them: flat, real numbers or bytes, all in one piece."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.shm.node.tensors import in_one_piece


def flat(tensor: Tensor) -> Tensor:
    """Its elements one after the other: the tensor's own where they lie so, otherwise a copy."""
    return in_one_piece(tensor).detach().view(-1)


def real(block: Tensor) -> Tensor:
    """A complex number counts as two real ones."""
    return torch.view_as_real(block).view(-1) if block.is_complex() else block


def size_of(block: Tensor) -> int:
    return block.numel() * block.itemsize


def as_bytes(block: Tensor) -> Tensor:
    return real(block).view(torch.uint8)


def typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """From bytes, which may begin anywhere, to elements."""
    if dtype.is_complex:
        return torch.view_as_complex(typed(data, dtype.to_real()).view(-1, 2))
    return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)


def memory(block: Tensor) -> memoryview:
    array: Any = as_bytes(block).numpy()
    return memoryview(array)


def read(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A copy, because what comes from the network is not aligned."""
    return torch.frombuffer(bytearray(data), dtype=dtype)


def write(block: Tensor, data: memoryview) -> None:
    if len(data):
        memory(block)[:] = data
