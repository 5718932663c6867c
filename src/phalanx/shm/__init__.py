"""MOVE: the backend `shm`, collectives of one machine at memory speed. Importing it registers it with torch."""

from __future__ import annotations

import torch.distributed as dist

from phalanx.shm.backend import ShmGroup
from phalanx.shm.native import describe
from phalanx.shm.segment import why_not_here

__all__ = ["ShmGroup", "describe", "why_not_here"]


def _create(options: dist.distributed_c10d._DistributedBackendOptions, _: object) -> ShmGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = options.group_id
    return ShmGroup(options.store, options.group_rank, options.group_size, options.timeout, name, ranks)


if "shm" not in dist.Backend.backend_list:
    dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
