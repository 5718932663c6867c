"""All-reduce: as reduce, but every rank gets the result. Here the sum, the maximum and the mean.

    phalanx run --nproc-per-node 4 examples/comm/all_reduce.py

This is what keeps data-parallel replicas alike: their gradients are averaged so after every backward.
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

    # nccl has ReduceOp.AVG, gloo has not; the sum divided by the size is right with both.
    show(world, "mean", total / world.size)
