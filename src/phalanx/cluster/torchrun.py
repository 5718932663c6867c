"""torchrun, ``phalanx run``, or RANK and WORLD_SIZE set by hand."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx import env
from phalanx.cluster.situation import Situation, master_from


def detect(environ: Mapping[str, str]) -> Situation | None:
    if not environ.get("RANK") and not environ.get("WORLD_SIZE"):
        return None
    rank = env.require_integer(environ, "RANK", beside="WORLD_SIZE")
    world_size = env.require_integer(environ, "WORLD_SIZE", beside="RANK")
    master, up = _store_address(environ)
    local_rank = env.integer(environ, "LOCAL_RANK")
    local_size = env.integer(environ, "LOCAL_WORLD_SIZE")
    return Situation(
        kind="torchrun",
        rank=rank,
        world_size=world_size,
        # One machine until the ranks have met: by hand they mostly share one, in Kubernetes each has its own.
        local_rank=rank if local_rank is None else local_rank,
        local_size=world_size if local_size is None else local_size,
        node=env.integer(environ, "GROUP_RANK") or 0,
        nodes=env.integer(environ, "GROUP_WORLD_SIZE") or 1,
        master=master,
        store_is_up=up,
        local_is_known=local_rank is not None,
    )


def _store_address(environ: Mapping[str, str]) -> tuple[tuple[str, int] | None, bool]:
    """Returns the address of the store, and True if the launcher serves it.

    MASTER_PORT comes first, because the innermost launcher has set it. Under `phalanx.spawn` the function may set it as
    it likes; the store is then the one of PHALANX_STORE, which spawn has started.
    """
    master = master_from(environ)
    if master is not None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return master, True
    host, _, port = environ.get("PHALANX_STORE", "").rpartition(":")
    if host:
        return (host, int(port)), True
    return master, False
