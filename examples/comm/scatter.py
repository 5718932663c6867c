"""Scatter: rank 0 has one piece for each rank and sends it to that rank.

    phalanx run --nproc-per-node 4 examples/comm/scatter.py

Use it for data that only one rank has, such as parts of a file that rank 0 has read.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    # Only the sender has the pieces, one for each rank in order; the others pass None. All pieces have one shape.
    pieces = None
    if world.is_main:
        pieces = [torch.tensor([to, to * to], device=world.device) for to in range(world.size)]
    show(world, "before", pieces)

    mine = torch.zeros(2, dtype=torch.int64, device=world.device)
    dist.scatter(mine, pieces, src=0)

    show(world, "after", mine)
