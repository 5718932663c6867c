"""All-reduce: like reduce, but every rank gets the result. Shown for the sum, the maximum and the mean.

    phalanx run --nproc-per-node 4 examples/comm/all_reduce.py

This keeps data-parallel replicas equal: it averages their gradients after every backward.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    values = torch.tensor([world.rank + 1, 10 * world.rank], device=world.device)
    show(world, "before", values)

    # It works in place, so each result starts from a copy.
    total = values.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    show(world, "after SUM", total)

    largest = values.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    show(world, "after MAX", largest)

    # gloo has no ReduceOp.AVG; the sum divided by the size works with every backend.
    show(world, "mean", total / world.size)
