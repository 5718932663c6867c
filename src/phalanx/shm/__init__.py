"""The backend `shm`: collectives of one machine at memory speed. Importing it registers it with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec

import torch.distributed as dist

from phalanx.native.library import describe
from phalanx.shm.node.segment import why_not_here
from phalanx.shm.node.work_queue import original_error
from phalanx.shm.process_group import ShmGroup
from phalanx.torch_compat import c10d, dynamo
from phalanx.torch_compat.nn import BACKWARD

__all__ = ["ShmGroup", "describe", "why_not_here"]

_P = ParamSpec("_P")


def _create(options: Any, _: object) -> ShmGroup:
    """Makes a group for torch. ``options`` are its _DistributedBackendOptions."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = options.group_id if dist.is_initialized() else "world"
    return ShmGroup(options.store, options.group_rank, options.group_size, options.timeout, name, ranks)


# ---- functions of torch that need another behaviour for a group of shm


def _with_original_error(plain: Callable[_P, None]) -> Callable[_P, None]:
    """DDP's C++ turns what a collective raises into a RuntimeError; a lost peer should be a PeerLost here too."""

    @functools.wraps(plain)
    def backward(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            plain(*args, **kwargs)
        except RuntimeError as error:
            ours = original_error(error)
            if ours is None:
                raise
            raise ours from error

    return backward


def _monitored_barrier(plain: Callable[..., None]) -> Callable[..., None]:
    """torch's own function only accepts a group with the name "gloo"."""

    @functools.wraps(plain)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        found = group or dist.group.WORLD
        if not isinstance(found, ShmGroup):
            return plain(group, timeout, wait_all_ranks)
        return found.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def _set_pg_timeout(plain: Callable[..., None]) -> Callable[..., None]:
    """torch's own function only sets the timeout of the gloo inside a group."""

    @functools.wraps(plain)
    def set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        plain(timeout, group)
        found = group or dist.group.WORLD
        if isinstance(found, ShmGroup):
            found.set_timeout(timeout)

    return set_pg_timeout


dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
dynamo.skip_methods(ShmGroup)  # a compiled DDP model calls its broadcast of buffers
BACKWARD.wrap(_with_original_error)
c10d.MONITORED_BARRIER.wrap(_monitored_barrier)
c10d.SET_TIMEOUT.wrap(_set_pg_timeout)
