"""Gather: rank 0 collects the tensor of every rank. The opposite of scatter.

    phalanx run --nproc-per-node 4 examples/comm/gather.py

Rank 0 needs memory for the tensors of all ranks; if a sum is enough, reduce needs memory for one tensor.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    mine = torch.tensor([world.rank, world.rank * world.rank], device=world.device)
    show(world, "before", mine)

    # Only the receiver allocates tensors, one for each rank; the others pass None.
    gathered = [torch.zeros_like(mine) for _ in range(world.size)] if world.is_main else None
    dist.gather(mine, gathered, dst=0)

    show(world, "after", gathered)
