"""Which part of a step a rank is in: data, forward, backward, optimizer, checkpoint.

From the places that every script passes: a DataLoader's next batch, backward, an optimizer's step, torch.save. What
lies between a batch and backward is forward; a script without a DataLoader is in forward from one step to the next.
"""

from __future__ import annotations

import functools
import os
from _thread import get_ident
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx import status
from phalanx.status import layout
from phalanx.torch_compat import dataloader
from phalanx.torch_compat.nn import BACKWARD, SAVE

_TORCH = str(Path(torch.__file__).parent) + os.sep
_after_a_step = layout.FORWARD
"""The phase between an optimizer's step and what comes next."""


def install() -> None:
    dataloader.NEXT.wrap(_fetching)
    BACKWARD.wrap(_going_backward)
    SAVE.wrap(functools.partial(_in_phase, layout.CHECKPOINT))
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    status.when_begun(lambda page: page.places.never_users([_TORCH]))


def _page_of_the_loop() -> status.StatusPage | None:
    """None in another thread: one that saves or fetches beside the loop says nothing of where the loop is."""
    page = status.own()
    return page if page is not None and page.thread == get_ident() else None


def _fetching(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(plain)
    def fetch(loader: Any) -> Any:
        global _after_a_step
        page = _page_of_the_loop()
        if page is None:
            return plain(loader)
        _after_a_step = layout.OTHER
        page.enter(layout.DATA)
        then = layout.OTHER
        try:
            batch = plain(loader)
            then = layout.FORWARD
            return batch
        finally:
            page.enter(then)

    return fetch


def _in_phase(phase: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    """In this phase while it runs."""

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # A compiler that traces this has to find nothing but the function itself.
        page = None if torch.compiler.is_compiling() else _page_of_the_loop()
        if page is None:
            return plain(*args, **kwargs)
        before = page.enter(phase)
        try:
            return plain(*args, **kwargs)
        finally:
            page.enter(before)

    return wrapped


def _going_backward(plain: Callable[..., Any]) -> Callable[..., Any]:
    """In backward while it runs, and in no phase that is known afterwards."""

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        page = None if torch.compiler.is_compiling() else status.own()
        if page is None:
            return plain(*args, **kwargs)
        page.thread = get_ident()  # where there is a backward, there is the loop
        before = page.enter(layout.BACKWARD)
        try:
            return plain(*args, **kwargs)
        finally:
            page.unblock()  # from where `waits` has seen the end of its own work
            # One backward may be a part of another, as in a checkpoint of activations.
            page.enter(layout.BACKWARD if before == layout.BACKWARD else layout.OTHER)

    return backward


def _before_step(*_: Any) -> None:
    page = None if torch.compiler.is_compiling() else status.own()
    if page is not None:
        page.enter(layout.OPTIMIZER)


def _after_step(*_: Any) -> None:
    page = None if torch.compiler.is_compiling() else status.own()
    if page is not None:
        page.stepped(_after_a_step)
