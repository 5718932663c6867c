"""Where memory runs out the kernel should rather take a rank than the process that can tell of it, and start it again.

It takes the largest. But a process with much memory takes a moment to end, and if another one asks for memory within
that moment, the next largest is taken too: the zygote, which has all of torch, though hardly anything of its own. So a
worker says that it counts for a little more than it has: as much as makes it larger than the zygote. To say that it
counts for less, the zygote would need a right that it seldom has in a container.
"""

from __future__ import annotations

import functools
import math
import os

from phalanx.system import cgroups, procfs

_MOST = 100
"""Of the kernel's 1000, which stand for all memory that there is."""


@functools.cache
def surplus() -> int:
    """In the zygote: what a worker has to add to its score, in thousandths of the memory that binds it."""
    limits = [cgroups.allowance().memory, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    memory = min(limit for limit in limits if limit is not None)
    return min(_MOST, math.ceil(1000 * (procfs.resident(os.getpid()) or 0) / memory))
