"""A process of ``mpirun``: Open MPI's own variables, or the PMI ones of MPICH and Intel MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx import env
from phalanx.cluster.situation import Situation, master_from, port_for
from phalanx.system.ports import LOOPBACK

_FAMILIES = {
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI_RANK": ("PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def detect(environ: Mapping[str, str]) -> Situation | None:
    for rank_name, (size_name, local_rank_name, local_size_name) in _FAMILIES.items():
        if rank_name not in environ:
            continue
        rank = env.require_integer(environ, rank_name, beside=size_name)
        world_size = env.require_integer(environ, size_name, beside=rank_name)
        local_size = env.integer(environ, local_size_name) or world_size
        local_rank = env.integer(environ, local_rank_name)
        return Situation(
            kind="openmpi",
            rank=rank,
            world_size=world_size,
            local_rank=rank % local_size if local_rank is None else local_rank,
            local_size=local_size,
            # mpirun gives no number of the machine; by default it fills one after the other.
            node=rank // local_size,
            nodes=-(-world_size // local_size),
            # On one machine all ranks are children of one daemon, whose pid gives them the same port.
            master=master_from(environ) or ((LOOPBACK, port_for(os.getppid())) if local_size == world_size else None),
        )
    return None
