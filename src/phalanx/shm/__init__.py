"""MOVE: the backend `shm`, collectives of one machine at memory speed. Importing it registers it with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from phalanx.shm.backend import ShmGroup
from phalanx.shm.native import describe
from phalanx.shm.segment import why_not_here

__all__ = ["ShmGroup", "describe", "why_not_here"]


def _create(options: dist.distributed_c10d._DistributedBackendOptions, _: object) -> ShmGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = options.group_id if dist.is_initialized() else "world"
    return ShmGroup(options.store, options.group_rank, options.group_size, options.timeout, name, ranks)


def _monitored_barrier(plain: Callable[..., None]) -> Callable[..., None]:
    """torch's own asks for the name "gloo"; there is a gloo inside of ours that can do it."""

    @functools.wraps(plain)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        found = group or dist.group.WORLD
        if not isinstance(found, ShmGroup):
            return plain(group, timeout, wait_all_ranks)
        return found.monitored_barrier(  # pyright: ignore[reportAttributeAccessIssue]  # the stubs lack it
            timeout or found.timeout, wait_all_ranks=wait_all_ranks
        )

    return monitored_barrier


dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = _monitored_barrier(dist.monitored_barrier)
