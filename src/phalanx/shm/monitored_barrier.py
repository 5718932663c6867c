"""monitored_barrier: rank 0 names the ranks that did not come. It uses the store only, so the group stays usable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.messages import Rank
from phalanx.shm.node.failures import CollectiveTimeout
from phalanx.store.primitives import read, wait_for, write

if TYPE_CHECKING:
    from torch.distributed import Store

_VERDICT_SECONDS = 1.0
"""Seconds beyond the timeout that the others wait for rank 0."""


def pass_together(store: Store, rank: int, size: int, timeout: float, wait_for_all: bool) -> None:
    """Returns when all ranks have come. Otherwise those that came raise an error with torch's own text."""
    if rank == 0:
        missing = _missing(store, size, timeout, wait_for_all)
        write(store, "verdict", missing)
        if missing:
            raise CollectiveTimeout(_error_text(missing, timeout))
        return
    write(store, f"rank {rank}", "here")
    if wait_for(store, "verdict", timeout + _VERDICT_SECONDS):
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
    if timeout > 0 and wait_for(store, [f"rank {other}" for other in range(1, size)], timeout):
        return []
    missing = [other for other in range(1, size) if timeout <= 0 or not store.check([f"rank {other}"])]
    return missing if wait_for_all else missing[:1]


def _error_text(missing: list[int], timeout: float) -> str:
    if timeout <= 0:
        return f"Rank 0 timed out in monitoredBarrier after {timeout:g} s."
    ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"{ranks} failed to pass monitoredBarrier in {timeout * 1000:.0f} ms."
