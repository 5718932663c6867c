"""Gather: rank 0 collects the tensor of every rank. The opposite of scatter.

    phalanx run --nproc-per-node 4 examples/comm/gather.py

Rank 0 must have room for all of it; where a sum is enough, reduce needs the room of one tensor.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    mine = torch.tensor([world.rank, world.rank * world.rank], device=world.device)
    show(world, "before", mine)

    # Only the receiver makes room, one place for each rank; the others pass None.
    places = [torch.zeros_like(mine) for _ in range(world.size)] if world.is_main else None
    dist.gather(mine, places, dst=0)

    show(world, "after", places)
