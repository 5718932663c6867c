"""Asynchronous point-to-point: isend and irecv return at once; `wait` waits until the tensor is sent or received.

    phalanx run --nproc-per-node 4 examples/comm/isend_irecv.py

First along a line, rank 0 to rank 1, 1 to 2 and so on; then in a ring, where all send and receive at once.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    following = (world.rank + 1) % world.size
    previous = (world.rank - 1) % world.size
    mine = torch.full((2,), 10 * world.rank, device=world.device)
    got = torch.full((2,), -1, device=world.device)

    show(world, "before the line", got)
    under_way = []
    if world.rank > 0:
        under_way.append(dist.irecv(got, src=previous))
    if world.rank < world.size - 1:
        under_way.append(dist.isend(mine, dst=following))
    # You can compute something here, but do not read `got` and do not change `mine`: both are in use until wait().
    for work in under_way:
        if work is not None:  # None is for a rank outside the group
            work.wait()
    show(world, "after the line", got)

    mine += 1  # may be changed again
    # In a ring every rank sends and receives. As one batch this cannot deadlock; one by one, nccl would run the isend
    # first on every rank, and no rank would get to its irecv.
    ring = [dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, got, previous)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    show(world, "after the ring", got)
