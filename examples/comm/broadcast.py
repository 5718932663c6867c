"""Broadcast: all ranks get the tensor of one of them, here of the last rank.

    phalanx run --nproc-per-node 4 examples/comm/broadcast.py

DistributedDataParallel broadcasts rank 0's parameters when it is created, so all replicas start equal.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    values = torch.tensor([world.rank, 10 * world.rank], device=world.device)
    show(world, "before", values)

    # The tensor is sent on the source and overwritten on the others: shape and dtype must be the same everywhere.
    dist.broadcast(values, src=world.size - 1)

    show(world, "after", values)
