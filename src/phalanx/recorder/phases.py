"""Notes which part of a step a rank is in: data, forward, backward, optimizer, checkpoint, or compiling.

It hooks what every script calls: a DataLoader's next batch, backward, an optimizer's step, torch.save. The time between
a batch and backward is forward; a script without a DataLoader is in forward from one step to the next.
"""

from __future__ import annotations

import os
from _thread import get_ident
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.preemption import stop_point
from phalanx.recorder import device_clock
from phalanx.recorder.around import around, never_raises
from phalanx.status import layout, own_page
from phalanx.status.page import StatusPage
from phalanx.torch_compat import dataloader
from phalanx.torch_compat.c10d import collectives_of, find_sequence_number
from phalanx.torch_compat.nn import BACKWARD, NEW_OPTIMIZER, SAVE

_TORCH = str(Path(torch.__file__).parent) + os.sep
_after_a_step = layout.FORWARD
"""The phase between an optimizer's step and the next phase that is known."""
_before_compiling: int | None = None


def install() -> None:
    dataloader.NEXT.wrap(around(_fetch))
    BACKWARD.wrap(around(_backward))
    SAVE.wrap(around(_save))
    NEW_OPTIMIZER.wrap(around(_will_step))
    find_sequence_number()
    register_optimizer_step_pre_hook(never_raises(_before_step))
    register_optimizer_step_post_hook(never_raises(_after_step))
    register_optimizer_step_post_hook(_reach_stop_point)  # the script's signal handlers may raise
    own_page.when_begun(lambda page: page.places.never_users([_TORCH]))


def _fetch(page: StatusPage, *_: object) -> AbstractContextManager[None] | None:
    return _fetching(page) if page.is_in_loop else None


@contextmanager
def _fetching(page: StatusPage) -> Iterator[None]:
    global _after_a_step
    _after_a_step = layout.OTHER
    page.enter(layout.DATA)
    then = layout.OTHER
    try:
        yield
        then = layout.FORWARD
    finally:
        page.enter(then)


def _save(page: StatusPage, *_: object, **__: object) -> AbstractContextManager[None] | None:
    return own_page.phase(layout.CHECKPOINT) if page.is_in_loop else None


@contextmanager
def _backward(page: StatusPage, tensors: object = None, *_: object, **__: object) -> Iterator[None]:
    """The phase after backward is not known."""
    device_clock.device = getattr(tensors, "device", device_clock.device)  # it may be set after groups were created
    page.thread = get_ident()  # the thread that calls backward runs the loop
    before = page.enter(layout.BACKWARD)
    try:
        yield
    finally:
        page.unblock()  # `ddp_models` has noted the end of its own work
        # One backward may be a part of another, as in a checkpoint of activations.
        is_whole = before != layout.BACKWARD
        if is_whole and device_clock.clock is not None:
            device_clock.clock.backward_ends()
        page.enter(layout.OTHER if is_whole else layout.BACKWARD)


def _before_step(*_: object) -> None:
    page = None if is_dynamo_compiling() else own_page.current()
    if page is not None:
        page.enter(layout.OPTIMIZER)


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    page = None if is_dynamo_compiling() else own_page.current()
    if page is not None:
        clock = device_clock.of_optimizer(optimizer, page)
        page.stepped(_after_a_step)
        if clock is not None:
            clock.stepped()


def _will_step(*_: object, **__: object) -> None:
    points = stop_point.current()
    if points is not None:
        points.will_step()


def _reach_stop_point(*_: object) -> None:
    points = None if is_dynamo_compiling() else stop_point.current()
    if points is not None:
        points.passed(collectives_of(torch.distributed.group.WORLD))


def compiling(*_: object) -> None:
    global _before_compiling
    page = own_page.current()
    _before_compiling = page.enter(layout.COMPILE) if page is not None and page.is_in_loop else None


def compiled(*_: object) -> None:
    page = own_page.current()
    if page is not None and _before_compiling is not None:
        page.enter(_before_compiling)
