"""Point-to-point without waiting: isend and irecv return at once, and `wait` is where the rank waits.

    phalanx run --nproc-per-node 4 examples/comm/isend_irecv.py

First along a line, rank 0 to rank 1, 1 to 2 and so on; then round a ring, where all send and receive at once.
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
    # Here is time to compute something, but not with `got`, nor may `mine` be changed: both are in use until wait().
    for work in under_way:
        if work is not None:  # None is for a rank outside the group
            work.wait()
    show(world, "after the line", got)

    mine += 1  # free again
    # In a ring everybody sends and receives. As one batch it cannot lock up; one by one, nccl would do the isend first
    # on every rank, and then no rank would come to its irecv.
    ring = [dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, got, previous)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    show(world, "after the ring", got)
