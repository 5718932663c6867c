"""One process: what scripts use of DistributedDataParallel, where there is nobody to talk to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from phalanx.parallel.names import save_without_prefix


class OneProcess(nn.Module):
    """The interface of DistributedDataParallel, without communication. The model is its child ``module``."""

    module: nn.Module
    require_backward_grad_sync = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up, as they do without it: there is nothing to be left out."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Nobody else can run out of data."""
        yield

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Accepted, and never called: no gradient is sent."""


class Alone(OneProcess):
    """A world of one: the model itself, behind the interface of DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        save_without_prefix(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside what this package has put around it."""
    while isinstance(model, OneProcess):
        model = model.module
    return model
