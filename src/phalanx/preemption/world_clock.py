"""The number of collectives of the world: a clock that shows the same on all ranks at the same step."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from phalanx.torch_compat.c10d import SEQUENCE_NUMBER

_count: Callable[[dist.ProcessGroup], int] | None = None


def install() -> None:
    """Finds torch's own count."""
    global _count
    _count = SEQUENCE_NUMBER.get()


def world_collectives() -> int:
    """Returns how many collectives the group of all ranks has called; 0 where nobody counts them."""
    group = dist.group.WORLD
    if group is None:
        return 0
    own = getattr(group, "collectives_called", None)
    if own is not None:
        return own
    try:
        return 0 if _count is None else _count(group)
    except RuntimeError:  # a backend of somebody else's does not count
        return 0
