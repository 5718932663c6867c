"""MOVE: the backend `shm`, collectives of one machine at memory speed. Importing it registers it with torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from phalanx.native.library import describe
from phalanx.shm import patches
from phalanx.shm.node.segment import why_not_here
from phalanx.shm.process_group import ShmGroup

__all__ = ["ShmGroup", "describe", "why_not_here"]


def _create(options: Any, _: object) -> ShmGroup:
    """``options`` are torch's _DistributedBackendOptions."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = options.group_id if dist.is_initialized() else "world"
    return ShmGroup(options.store, options.group_rank, options.group_size, options.timeout, name, ranks)


dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
patches.apply()
