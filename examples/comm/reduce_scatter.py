"""Reduce-scatter: the tensors of all ranks are added up, and each rank keeps one part of the sum.

    phalanx run --nproc-per-node 4 examples/comm/reduce_scatter.py

Followed by all_gather it is an all_reduce. Sharded training needs only the first half: each rank keeps its part.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

# torch 2.13 gave reduce_scatter_tensor this new name and warns about the old one.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

with px.init() as world:
    # Two numbers for each rank: part 0 goes to rank 0, part 1 to rank 1, and so on.
    values = torch.arange(2 * world.size, device=world.device) + 100 * world.rank
    show(world, "before", values)

    part = torch.zeros(2, dtype=values.dtype, device=world.device)
    reduce_scatter_single(part, values, op=dist.ReduceOp.SUM)

    show(world, "after", part)
