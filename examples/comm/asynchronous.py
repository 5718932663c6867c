"""Asynchronous collectives: async_op=True starts one and returns a handle; call `wait` before you use the result.

    phalanx run --nproc-per-node 4 examples/comm/asynchronous.py

DistributedDataParallel overlaps its communication with the rest of the backward in this way.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    total = torch.tensor([world.rank + 1, 10 * world.rank], device=world.device)
    shared = torch.full((2,), world.rank, device=world.device)
    mine = torch.tensor([world.rank], device=world.device)
    everybody = [torch.full_like(mine, -1) for _ in range(world.size)]
    for name, value in (("all_reduce", total), ("broadcast", shared), ("all_gather", everybody)):
        show(world, f"before {name}", value)

    # All three run at the same time. Every rank must start them in the same order, because they are matched by order.
    under_way = [
        dist.all_reduce(total, async_op=True),
        dist.broadcast(shared, src=world.size - 1, async_op=True),
        dist.all_gather(everybody, mine, async_op=True),
    ]

    # Meanwhile, work with other tensors. Those above belong to the collectives until wait().
    ones = torch.ones(256, 256, device=world.device)
    product = ones @ ones
    show(world, "meanwhile", product[0, :2])

    for work in under_way:
        assert work is not None  # None is for a rank outside the group
        work.wait()  # on CUDA the stream waits, not the host: what is queued from here on sees the result
    for name, value in (("all_reduce", total), ("broadcast", shared), ("all_gather", everybody)):
        show(world, f"after {name}", value)
