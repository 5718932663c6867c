"""Groups of some ranks: the even ranks add up among themselves, and so do the odd ones, at the same time.

    phalanx run --nproc-per-node 4 examples/comm/subgroups.py

On two ranks each group has one member, and nothing changes.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    # Every rank makes every group, in the same order, also those that it is not in. A common cause of hangs.
    even = dist.new_group(list(range(0, world.size, 2)))
    odd = dist.new_group(list(range(1, world.size, 2)))
    group, first = (even, 0) if world.rank % 2 == 0 else (odd, 1)
    assert isinstance(group, dist.ProcessGroup)  # the group that this rank is not in is a mere number to it

    total = torch.tensor([world.rank, 1], device=world.device)
    show(world, "before all_reduce", total)
    dist.all_reduce(total, group=group)
    show(world, "after all_reduce", total)

    # A source is named by its number in the world, here 0 and 1; within the group both are number 0.
    values = torch.tensor([world.rank, dist.get_rank(group)], device=world.device)
    show(world, "before broadcast", values)
    dist.broadcast(values, src=first, group=group)
    show(world, "after broadcast", values)
