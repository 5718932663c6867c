"""Which part is this process's: the number of ranks and its own, given or found."""

from __future__ import annotations

import torch.distributed as dist

from phalanx import world as worlds
from phalanx.argparser import whole_number
from phalanx.errors import UsageError


def find_position(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """What is not given comes from the process group; without one, this is a world of one.

    A process that a launcher has started as one of several, and that has not joined them yet, is an error: taken for a
    world of one, every rank would see every sample.
    """
    num_replicas = num_replicas if num_replicas is None else whole_number("num_replicas", num_replicas)
    rank = rank if rank is None else whole_number("rank", rank)
    if num_replicas is None or rank is None:
        size, own = _joined()
        if size == 1 and rank is None and num_replicas not in (None, 1):
            raise UsageError(f"num_replicas={num_replicas} was given without a rank; give rank=… as well.")
        if size == 1 and num_replicas is None and rank not in (None, 0):
            raise UsageError(f"rank={rank} was given without num_replicas; give num_replicas=… as well.")
        num_replicas = size if num_replicas is None else num_replicas
        rank = own if rank is None else rank
    if num_replicas < 1:
        raise UsageError(f"num_replicas is {num_replicas}; give 1 or more.")
    if not 0 <= rank < num_replicas:
        raise UsageError(f"rank is {rank}, but there are {num_replicas} ranks; give 0 to {num_replicas - 1}.")
    return num_replicas, rank


def _joined() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    world = worlds.current()
    return world.size, world.rank
