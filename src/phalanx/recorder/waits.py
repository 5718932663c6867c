"""Where a loop waits for other ranks: the rest of a step is its own work.

On shm, collectives that run in the loop's thread say it themselves. Here is what torch does in C++: the end of
backward, when DDP waits for the gradients of all ranks; the works of gloo; DDP's buffers before forward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import status

_engine: Any = torch.autograd.Variable._execution_engine


def install() -> None:
    if not dist.is_available():
        return
    work: Any = dist.Work
    work.wait = _waiting(work.wait)
    dist._broadcast_coalesced = _waiting(dist._broadcast_coalesced)


def note_end_of_own(tensors: Any) -> Any:
    """To be called before backward of these: from the moment when its last gradient is there, the loop waits.

    DDP waits in a callback of the autograd engine. They are called in the order in which they have been asked for, and
    the one here is asked for by the first thing in backward. Returns what has to be removed afterwards, or None.
    """
    first = tensors if isinstance(tensors, Tensor) else tensors[0] if isinstance(tensors, (list, tuple)) else None
    if not isinstance(first, Tensor) or not first.requires_grad or _is_compiled():
        return None
    return first.register_hook(_ask)


def _ask(_: Tensor) -> None:
    _engine.queue_callback(_has_ended)


def _has_ended() -> None:
    page = status.own()
    if page is not None:
        page.block()


def _is_compiled() -> bool:
    """Whether backward itself is traced by a compiler, which would take the callback for a part of the model."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.compiled_autograd_enabled


def _waiting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def wait(*args: Any, **kwargs: Any) -> Any:
        page = status.own()
        if page is None or not page.block():
            return plain(*args, **kwargs)
        try:
            return plain(*args, **kwargs)
        finally:
            page.unblock()

    return wait
