"""All-gather: every rank collects the tensor of every rank, as a list or as one tensor.

    phalanx run --nproc-per-node 4 examples/comm/all_gather.py

The tensors of all ranks must have the same shape; all_gather_object has no such rule.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

# torch 2.13 gave all_gather_into_tensor this new name and warns about the old one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

with px.init() as world:
    mine = torch.tensor([world.rank, 10 * world.rank], device=world.device)
    show(world, "before", mine)

    as_list = [torch.zeros_like(mine) for _ in range(world.size)]
    dist.all_gather(as_list, mine)
    show(world, "after, a list", as_list)

    # One tensor, with the ranks one after the other along the first dimension: this saves a copy.
    as_tensor = torch.zeros(world.size * len(mine), dtype=mine.dtype, device=world.device)
    all_gather_single(as_tensor, mine)
    show(world, "after, a tensor", as_tensor)
