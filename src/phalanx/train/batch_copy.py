"""Moves batches to the device of a rank, beside the kernels of the steps before where the device has streams."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.devices import accelerator
from phalanx.status import notices
from phalanx.torch_compat.tensors import tree_map_where

_T = TypeVar("_T")


class BatchCopy:
    """Moves the batches of one pass.

    The host runs ahead of an accelerator. A copy on a stream of its own does not wait for the kernels that are queued,
    and those of this step wait for the copy. No batch is fetched early: the state of a loader would be ahead, too.
    """

    def __init__(self, device: torch.device, loader: object) -> None:
        self._device, self._stream = device, accelerator.copy_stream(device)
        if self._stream is not None and getattr(loader, "pin_memory", None) is False:
            notices.give("batches are copied from memory that is not pinned; DataLoader(…, pin_memory=True) is faster.")

    def __call__(self, batch: _T) -> _T:
        """Moves tensors, and what takes its own along: encodings of transformers, graphs, packed sequences."""
        moved = tree_map_where(lambda value: callable(getattr(value, "to", None)), self._move, batch)
        if self._stream is not None:
            accelerator.module(self._device).current_stream(self._device).wait_stream(self._stream)
        return moved

    def _move(self, value: Any) -> object:
        if self._stream is not None and isinstance(value, Tensor) and value.device.type == "cpu":
            with accelerator.module(self._device).stream(self._stream):
                tensor = value.to(self._device, non_blocking=True)
            # The memory belongs to the copying stream, which must not reuse it while the kernels read it.
            tensor.record_stream(accelerator.module(self._device).current_stream(self._device))
            return tensor
        try:
            return value.to(self._device, non_blocking=True)
        except TypeError:  # a `to` that somebody has written
            return value.to(self._device)
