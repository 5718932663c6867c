"""The rank and node of a process, in one form for every kind of launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx import env
from phalanx.argparser import whole_number
from phalanx.errors import UsageError
from phalanx.system.ports import check_port


@dataclass(frozen=True)
class Situation:
    """The rank of this process among all, and on its node, as its launcher gives it."""

    kind: Literal["torchrun", "slurm", "openmpi", "single"]
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    master: tuple[str, int] | None
    """The address of the store, which rank 0 may have to serve; None if it is not given."""
    store_is_up: bool = False
    """The launcher serves the store: no rank may."""
    local_is_known: bool = True
    """False if only rank and world size are given: `on_nodes` tells which ranks share a node, once they have met."""
    job: str = ""
    """The name of the job: its port is guessed, so a process of another job may come there too."""

    def __post_init__(self) -> None:
        check_rank(self.rank, self.world_size)


def check_rank(rank: int, world_size: int) -> tuple[int, int]:
    rank, world_size = whole_number("rank", rank), whole_number("world_size", world_size)
    if world_size < 1:
        raise UsageError(f"the world size is {world_size}; it must be at least 1.")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} does not exist in a world of {world_size}: ranks go from 0 to {world_size - 1}.")
    return rank, world_size


def override(found: Situation, rank: int | None, world_size: int | None) -> Situation:
    """Returns the situation with the rank and world size that were given as arguments, which override the launcher."""
    if rank is None and world_size is None:
        return found
    if rank is None:
        if world_size != found.world_size and found.kind == "single" and world_size != 1:
            raise UsageError(f"world_size={world_size} was given without a rank; give rank=… as well.")
        rank = found.rank
    if world_size is None:
        if found.kind == "single" and rank != 0:
            raise UsageError(f"rank={rank} was given without a world size; give world_size=… as well.")
        world_size = found.world_size
    rank, world_size = check_rank(rank, world_size)
    if (rank, world_size) == (found.rank, found.world_size):
        return found
    numbers = {"local_rank": rank, "local_size": world_size, "node": 0, "nodes": 1, "local_is_known": False}
    return replace(found, rank=rank, world_size=world_size, **numbers)


def on_nodes(situation: Situation, hosts: Sequence[str]) -> Situation:
    """Returns the situation with the node and the local rank that follow from the host of every rank."""
    own = hosts[situation.rank]
    return replace(
        situation,
        local_rank=hosts[: situation.rank].count(own),
        local_size=hosts.count(own),
        node=list(dict.fromkeys(hosts)).index(own),
        nodes=len(set(hosts)),
        local_is_known=True,
    )


def master_from(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns MASTER_ADDR and MASTER_PORT if both are there."""
    address = environ.get("MASTER_ADDR")
    port = env.integer(environ, "MASTER_PORT")
    if not address or port is None:
        return None
    return address, check_port(port, "MASTER_PORT")


def port_for(job: int) -> int:
    """Returns the same port on all ranks of a job, outside the range of outgoing connections."""
    return 15000 + job % 10000
