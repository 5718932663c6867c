"""Groups of some ranks: the even ranks and the odd ranks each compute their own sum, at the same time.

    phalanx run --nproc-per-node 4 examples/comm/subgroups.py

On two ranks each group has one rank, and nothing changes.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    # Every rank must create every group, in the same order, also those that it is not in; otherwise the ranks hang.
    even = dist.new_group(list(range(0, world.size, 2)))
    odd = dist.new_group(list(range(1, world.size, 2)))
    group, first = (even, 0) if world.rank % 2 == 0 else (odd, 1)
    assert isinstance(group, dist.ProcessGroup)  # for a group without this rank it is a number

    total = torch.tensor([world.rank, 1], device=world.device)
    show(world, "before all_reduce", total)
    dist.all_reduce(total, group=group)
    show(world, "after all_reduce", total)

    # A source is given by its rank in the world, here 0 and 1; within its group each has rank 0.
    values = torch.tensor([world.rank, dist.get_rank(group)], device=world.device)
    show(world, "before broadcast", values)
    dist.broadcast(values, src=first, group=group)
    show(world, "after broadcast", values)
