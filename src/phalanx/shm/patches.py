"""What torch does with any process group and has to do a little differently with ours."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from phalanx.shm.node.work_queue import original
from phalanx.shm.process_group import ShmGroup


def apply() -> None:
    """Once, when the backend is registered."""
    _keep_compilers_out()
    torch.autograd.backward = _telling_the_original(torch.autograd.backward)
    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = _monitored_barrier(dist.monitored_barrier)
    dist.distributed_c10d._set_pg_timeout = _set_pg_timeout(dist.distributed_c10d._set_pg_timeout)


def _keep_compilers_out() -> None:
    """torch.compile traces whatever Python runs below a compiled model, and DDP's broadcast of buffers comes to us.

    torch.compiler.disable would say the same and import all of the compiler for it.
    """
    plain: Any = importlib.import_module("torch._C._dynamo").eval_frame
    action = plain._FrameAction.SKIP
    strategy = plain._FrameExecStrategy(action, action)  # of the function, and of all that it calls
    for member in vars(ShmGroup).values():
        if isinstance(member, FunctionType):
            plain.set_code_exec_strategy(member.__code__, strategy)


def _telling_the_original(plain: Callable[..., None]) -> Callable[..., None]:
    """DDP's C++ turns whatever a collective raises into a RuntimeError; a lost peer should be a PeerLost here too."""

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        try:
            plain(*args, **kwargs)
        except RuntimeError as error:
            ours = original(error)
            if ours is None:
                raise
            raise ours from error

    return backward


def _monitored_barrier(plain: Callable[..., None]) -> Callable[..., None]:
    """torch's own asks for the name "gloo"."""

    @functools.wraps(plain)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        found: Any = group or dist.group.WORLD
        if not isinstance(found, ShmGroup):
            return plain(group, timeout, wait_all_ranks)
        return found.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def _set_pg_timeout(plain: Callable[..., None]) -> Callable[..., None]:
    """torch's own reaches the gloo inside a group alone."""

    @functools.wraps(plain)
    def set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        plain(timeout, group)
        found: Any = group or dist.group.WORLD
        if isinstance(found, ShmGroup):
            found.set_timeout(timeout)

    return set_pg_timeout
