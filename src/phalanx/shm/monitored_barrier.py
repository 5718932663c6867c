"""monitored_barrier: the first rank names those that did not come. It goes through the store, and breaks no group."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.messages import Rank
from phalanx.shm.node.failures import CollectiveTimeout
from phalanx.store.primitives import read, wait_for, write

if TYPE_CHECKING:
    from torch.distributed import Store

_FOR_THE_VERDICT = 1.0
"""Seconds that the others give the first rank beyond its own timeout."""


def pass_together(store: Store, rank: int, size: int, timeout: float, wait_for_all: bool) -> None:
    """Returns when all ranks have come; otherwise an error in torch's own words, on those that have."""
    if rank == 0:
        missing = _missing(store, size, timeout, wait_for_all)
        write(store, "verdict", missing)
        if missing:
            raise CollectiveTimeout(_complaint(missing, timeout))
        return
    write(store, f"rank {rank}", "here")
    if wait_for(store, "verdict", timeout + _FOR_THE_VERDICT):
        missing = read(store, "verdict", list[Rank])
        if not missing:
            return
        reason = f"of ranks that did not come: {', '.join(map(str, missing))}"
    else:
        reason = "it did not come itself"
    raise CollectiveTimeout(
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank "
        f"0, because {reason}."
    )


def _missing(store: Store, size: int, timeout: float, wait_for_all: bool) -> list[int]:
    deadline = time.monotonic() + timeout
    missing = []
    for other in range(1, size):
        left = deadline - time.monotonic()
        if timeout <= 0 or not wait_for(store, f"rank {other}", left):
            missing.append(other)
            if not wait_for_all:
                break
    return missing


def _complaint(missing: list[int], timeout: float) -> str:
    if timeout <= 0:
        return f"Rank 0 timed out in monitoredBarrier after {timeout:g} s."
    ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"{ranks} failed to pass monitoredBarrier in {timeout * 1000:.0f} ms."
