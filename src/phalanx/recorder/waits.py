"""Where a loop waits for other ranks: the rest of a step is its own work.

On shm, collectives that run in the loop's thread say it themselves. Here is what torch does in C++: the end of
backward, when DDP waits for the gradients of all ranks; the works of gloo; DDP's buffers before forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from phalanx import status
from phalanx.recorder import flight_reader
from phalanx.status import layout
from phalanx.torch_compat import c10d
from phalanx.torch_compat.nn import DDP_BROADCAST, DDP_INIT, ENGINE

_engine: Any = None
"""Of autograd; its callbacks are called at the end of backward."""


def install() -> None:
    global _engine
    if not dist.is_available():
        return
    c10d.WAIT.wrap(_waiting if flight_reader.is_there() else _noted_waiting)
    DDP_BROADCAST.wrap(_waiting)
    _engine = ENGINE.get()
    if _engine is not None:
        DDP_INIT.wrap(_noted)


def _noted(plain: Callable[..., None]) -> Callable[..., None]:
    """DDP waits in a callback of the autograd engine, at the end of backward. The engine calls them in the order in
    which they were asked for, and DDP asks when the last parameter has its gradient. So whoever asks for one when any
    parameter gets its gradient is called when all own work is done, and just before DDP begins to wait."""

    @functools.wraps(plain)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if status.own() is not None:
            # The first one is what everything else is computed from, so no backward leaves it out.
            first = next((parameter for parameter in self.module.parameters() if parameter.requires_grad), None)
            if first is not None:
                first.register_hook(_ask)

    return init


@unserializable_hook  # or saving a whole model would warn of it
def _ask(_: Tensor) -> None:
    page = None if torch.compiler.is_compiling() else status.own()
    if page is not None and page.is_in_backward:
        _engine.queue_callback(page.block)


def _waiting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """It is the end of a collective, whatever backend runs it."""

    @functools.wraps(plain)
    def wait(*args: Any, **kwargs: Any) -> Any:
        page = None if torch.compiler.is_compiling() else status.own()
        if page is None or not page.block():
            return plain(*args, **kwargs)
        try:
            result = plain(*args, **kwargs)
        finally:
            page.unblock()
        page.tick()
        return result

    return wait


def _noted_waiting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The same where torch does not say which collective it is."""

    @functools.wraps(plain)
    def wait(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        with status.waiting(layout.COLLECTIVE):
            return plain(*args, **kwargs)

    return wait
