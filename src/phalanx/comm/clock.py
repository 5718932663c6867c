"""How long this process has been in collectives."""

from __future__ import annotations

import sys


def seconds() -> float | None:
    """Of all collectives of the default group so far, with the waiting for other ranks, beside computing or not.

    None when the backend cannot tell: torch's own do it all in C++.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return 0.0
    return getattr(dist.group.WORLD, "seconds_in_collectives", None)
