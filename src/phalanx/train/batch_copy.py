"""Moves batches to the device of a rank, beside the kernels of the steps before where the device has streams."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.devices import streams
from phalanx.status import notices
from phalanx.torch_compat.tensors import tree_map_where

_T = TypeVar("_T")


class BatchCopy:
    """Moves the batches of one pass.

    On an accelerator the host runs ahead of the device. A copy on a stream of its own does not wait for the kernels
    that are queued, and the kernels of this step wait for the copy. No batch is fetched before the loop asks for it: a
    loader that is saved in a checkpoint would be one batch further than training.
    """

    def __init__(self, device: torch.device, loader: object) -> None:
        self._device = device
        self._stream = streams.beside_kernels(device)
        if self._stream is not None and getattr(loader, "pin_memory", None) is False:
            notices.give(
                f"batches are copied to {device.type} from memory that is not pinned, which holds up the host; "
                "give DataLoader(…, pin_memory=True)."
            )

    def __call__(self, batch: _T) -> _T:
        moved = tree_map_where(_can_move, self._move, batch)
        if self._stream is not None:
            streams.current(self._device).wait_stream(self._stream)
        return moved

    def _move(self, value: Any) -> object:
        if self._stream is None or not isinstance(value, Tensor) or value.device.type != "cpu":
            return _moved(value, self._device)
        with streams.within(self._stream, self._device):
            tensor = _moved(value, self._device)
        # The memory belongs to the copying stream, which must not reuse it while the kernels read it.
        tensor.record_stream(streams.current(self._device))
        return tensor


def _can_move(value: object) -> bool:
    """Tensors, and what takes its own tensors along: encodings of transformers, graphs, packed sequences."""
    return callable(getattr(value, "to", None))


def _moved(value: Any, device: torch.device) -> Any:
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # a `to` that somebody has written
        return value.to(device)
