"""Automatic mixed precision, the same lines on every device: bf16 on CPUs, bf16 or scaled fp16 on GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from phalanx import world as worlds
from phalanx.errors import UsageError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class autocast:
    """torch.autocast for this rank's device, with the gradient scaler that fp16 needs and bf16 does not.

        amp = px.autocast()
        for x, y in px.track(loader, epoch=epoch):
            with amp:
                loss = criterion(model(x), y)
            amp.backward(loss)
            amp.clip(optimizer, max_norm=1.0)  # if wanted; only before a step
            amp.step(optimizer)
            optimizer.zero_grad()

    ``dtype``: ``"bf16"``, ``"fp16"`` (GPUs only), or what fits the device: bf16 on CPUs and on GPUs that have it,
    otherwise fp16. With ``enabled=False`` everything runs in full precision, by the same lines. With `px.accumulate`
    call ``backward`` for every part, ``clip`` and ``step`` when a step is complete.
    """

    def __init__(self, dtype: str | torch.dtype | None = None, enabled: bool = True) -> None:
        kind = worlds.current().device.type
        self.dtype = _choose(dtype, kind)
        self._kind, self._enabled = kind, enabled
        self.scaler = torch.amp.GradScaler(kind, enabled=enabled and self.dtype is torch.float16)
        """torch's own; with bf16 it passes everything through."""
        self._open: list[Any] = []
        self._unscaled: set[int] = set()

    def __enter__(self) -> autocast:
        block: Any = torch.autocast(self._kind, dtype=self.dtype, enabled=self._enabled)
        block.__enter__()
        self._open.append(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, trace)

    def backward(self, loss: Tensor) -> None:
        """loss.backward(), scaled where fp16 needs it. Outside of the ``with`` block, as torch advises."""
        self.scaler.scale(loss).backward()

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Scales all gradients of the optimizer down to a norm of ``max_norm`` at most; returns the norm they had.

        Gradients are the same on all ranks after backward, and so is the norm: nothing is exchanged.
        """
        if self.scaler.is_enabled() and id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))
        return torch.nn.utils.clip_grad_norm_(_parameters(optimizer), max_norm)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """optimizer.step(); with fp16 left out when a gradient has overflowed, and the scale is adapted."""
        self.scaler.step(optimizer)
        self.scaler.update()
        self._unscaled.discard(id(optimizer))

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state or not self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _choose(asked: str | torch.dtype | None, kind: str) -> torch.dtype:
    if asked is None:
        return torch.bfloat16 if kind == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    dtype = _DTYPES.get(asked) if isinstance(asked, str) else asked
    if dtype not in _DTYPES.values():
        raise UsageError(f"autocast(dtype={asked!r}) is unknown; give 'bf16' or 'fp16', or leave it out.")
    if dtype is torch.float16 and kind == "cpu":
        raise UsageError("autocast(dtype='fp16'): on CPUs gradients would overflow without a scaler; use 'bf16'.")
    assert dtype is not None
    return dtype
