"""Reduce: the tensors of all ranks are added up, element by element, and one rank gets the sum.

    phalanx run --nproc-per-node 4 examples/comm/reduce.py

Besides SUM there are MIN, MAX and PRODUCT, and AVG with nccl and shm.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    values = torch.tensor([world.rank + 1, 10 * world.rank], device=world.device)
    show(world, "before", values)

    dist.reduce(values, dst=0, op=dist.ReduceOp.SUM)

    # The tensors of the other ranks may hold partial sums afterwards; do not use them.
    show(world, "after", values if world.is_main else "nothing to rely on; the sum is on rank 0")
