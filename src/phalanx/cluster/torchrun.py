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
    local_rank = env.integer(environ, "LOCAL_RANK")
    local_size = env.integer(environ, "LOCAL_WORLD_SIZE")
    return Situation(
        kind="torchrun",
        rank=rank,
        world_size=world_size,
        # Set by hand, without the local ones, means one machine.
        local_rank=rank if local_rank is None else local_rank,
        local_size=world_size if local_size is None else local_size,
        node=env.integer(environ, "GROUP_RANK") or 0,
        nodes=env.integer(environ, "GROUP_WORLD_SIZE") or 1,
        master=_store(environ) or master_from(environ),
        store_is_up=_store(environ) is not None or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The store of phalanx's own launcher. A script that chose its own MASTER_PORT for itself is not disturbed."""
    host, _, port = environ.get("PHALANX_STORE", "").rpartition(":")
    return (host, int(port)) if host else None
