"""Automatic mixed precision, with the same code on every device: bf16 on CPUs, bf16 or scaled fp16 on GPUs."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from phalanx import world as worlds
from phalanx.devices import accelerator
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

    ``dtype``: ``"bf16"``, ``"fp16"`` (GPUs only), or what fits the device: bf16 on CPUs and on GPUs that compute in it,
    otherwise fp16. With ``enabled=False`` everything runs in full precision. With `px.accumulate` call ``backward`` for
    every part, ``clip`` and ``step`` when a step is complete. Optimizers that share a backward share one ``step``.
    """

    def __init__(self, dtype: str | torch.dtype | None = None, enabled: bool = True) -> None:
        device = worlds.current().device
        self.dtype = _choose(dtype, device)
        self._kind, self._enabled = device.type, enabled
        self.scaler = torch.amp.GradScaler(device.type, enabled=enabled and self.dtype is torch.float16)
        """torch's own scaler; with bf16 it does nothing."""
        self._open: list[torch.autocast] = []
        self._unscaled: set[int] = set()

    def __enter__(self) -> autocast:
        block = torch.autocast(self._kind, dtype=self.dtype, enabled=self._enabled)
        block.__enter__()
        self._open.append(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, trace)

    def backward(self, loss: Tensor) -> None:
        """Calls loss.backward(), scaled if fp16 needs it. Call it outside of the ``with`` block, as torch advises."""
        self.scaler.scale(loss).backward()

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Scales all gradients of the optimizer down to a norm of at most ``max_norm``; returns the norm before that.

        Gradients are the same on all ranks after backward, and so is the norm: nothing is exchanged.
        """
        if self.scaler.is_enabled() and id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizer: torch.optim.Optimizer, *others: torch.optim.Optimizer) -> None:
        """Calls step() of each optimizer, unless its gradients have overflowed in fp16; then adapts the scale, once."""
        if self._unscaled - {id(each) for each in (optimizer, *others)}:
            raise UsageError("an optimizer was clipped and is left out; give all in one call: amp.step(first, second).")
        for each in (optimizer, *others):
            self.scaler.step(each)
        self.scaler.update()
        self._unscaled.clear()

    def state_dict(self) -> dict[str, object]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        if state or not self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


def _choose(asked: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if asked is None:
        return torch.bfloat16 if accelerator.has_bf16(device) else torch.float16
    dtype = _DTYPES.get(asked) if isinstance(asked, str) else asked
    if dtype not in _DTYPES.values():
        raise UsageError(f"autocast(dtype={asked!r}) is unknown; give 'bf16' or 'fp16', or leave it out.")
    if dtype is torch.float16 and device.type == "cpu":
        raise UsageError("autocast(dtype='fp16'): on CPUs gradients would overflow without a scaler; use 'bf16'.")
    assert dtype is not None
    return dtype
