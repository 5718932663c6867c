"""Gradient accumulation: several small batches make one step, and the ranks exchange gradients only for the last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

from torch import nn

from phalanx.argparser import whole_number
from phalanx.errors import UsageError
from phalanx.train import track


class accumulate:
    """Counts batches; within its ``with`` block gradients are exchanged only for the last batch of ``every``.

        parts = px.accumulate(model, every=4)
        for x, y in px.track(loader, epoch=epoch):
            with parts:
                loss = criterion(model(x), y)
                (loss / parts.size).backward()
            if parts.complete:
                optimizer.step()
                optimizer.zero_grad()

    Gradients of the parts add up, so each loss is divided by ``parts.size``: the step is then that of one batch of
    all parts, if they are of one length. Under `px.track` the last batches of an epoch that do not fill a step make a
    smaller one, and ``size`` is their number; without it they wait for the next epoch's first batches.

    The forward pass must be inside the block too: DDP decides there whether it will exchange gradients.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        every = whole_number("every", every, 1)
        self._no_sync: Callable[[], contextlib.AbstractContextManager[object]] | None = getattr(model, "no_sync", None)
        if self._no_sync is None:
            raise UsageError(
                f"accumulate got a {type(model).__name__}, which has no no_sync(); wrap it with px.data_parallel first."
            )
        self._every = every
        self._done = 0
        self._blocks: list[contextlib.AbstractContextManager[object]] = []
        self.size = every
        """The number of batches in the current step."""

    @property
    def complete(self) -> bool:
        """True after the last batch of a step: it is time for the optimizer's step."""
        return self._done == 0

    def __enter__(self) -> accumulate:
        if self._done == 0:
            left = track.batches_left()
            self.size = self._every if left is None else max(1, min(self._every, left))
        last = self._done + 1 == self.size
        block = contextlib.nullcontext() if last or self._no_sync is None else self._no_sync()
        block.__enter__()
        self._blocks.append(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks.pop().__exit__(kind, error, trace)
        if kind is None:
            self._done = (self._done + 1) % self.size
