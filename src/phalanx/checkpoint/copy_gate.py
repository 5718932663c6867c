"""Delays what would change tensors while they are being copied.

That is a step of any torch.optim.Optimizer, and loading a state dict into any module. Forward and backward only read
parameters and the optimizer's state, so they need not wait.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from phalanx.torch_compat import nn
from phalanx.torch_compat.names import Patch

P = ParamSpec("P")
R = TypeVar("R")
_pending: set[threading.Event] = set()
"""One for each copy under way in this process."""


def _wait_for_copies(*_: object) -> None:
    for copied in tuple(_pending):
        copied.wait()


class CopyGate:
    """Shut while the copy of one checkpointer is made. It opens when the copy ends or fails."""

    def __init__(self) -> None:
        self._copied = threading.Event()
        self._copied.set()
        self._hook: RemovableHandle | None = None

    def shut(self) -> None:
        # The hook stays until `remove`, on the training thread: removing it while a step iterates over the hooks would
        # be an error in that step.
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(_wait_for_copies)
        self._copied.clear()
        _pending.add(self._copied)
        _update_guard()

    def open(self) -> None:
        """May be called from any thread."""
        _pending.discard(self._copied)
        self._copied.set()
        _update_guard()

    def remove(self) -> None:
        self._copied.wait()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


# A module's own hooks would be copied and pickled with it, so torch's method waits instead, while there is a copy.
_lock = threading.Lock()
_guard: Patch | None = None


def _guarded(original: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(original)
    def load_state_dict(*args: P.args, **kwargs: P.kwargs) -> R:
        _wait_for_copies()
        return original(*args, **kwargs)

    return load_state_dict


def _update_guard() -> None:
    """Guards loading while there is a copy. If somebody has wrapped our guard, it stays, and no longer waits."""
    global _guard
    with _lock:
        if _pending and _guard is None:
            _guard = nn.LOAD_STATE_DICT.wrap(_guarded)
        elif not _pending and _guard is not None and _guard.undo():
            _guard = None


def _reset_after_fork() -> None:
    """The threads that copy do not exist in a forked process."""
    global _lock
    _pending.clear()
    _lock = threading.Lock()
    _update_guard()


if hasattr(os, "register_at_fork"):  # Windows has none
    os.register_at_fork(after_in_child=_reset_after_fork)
