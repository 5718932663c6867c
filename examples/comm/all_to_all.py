"""All-to-all: every rank has something for every rank. Seen as a matrix with a row for each rank, it is transposed.

    phalanx run --nproc-per-node 4 examples/comm/all_to_all.py

The list form, dist.all_to_all, does the same; gloo has learnt it late, and this one it has known for long.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    # The number at place k is for rank k, and says so: 10 × who sends + who gets it.
    outgoing = 10 * world.rank + torch.arange(world.size, device=world.device)
    incoming = torch.zeros_like(outgoing)
    show(world, "before", outgoing)
    dist.all_to_all_single(incoming, outgoing)
    show(world, "after", incoming)

    # The parts may differ in length, if both sides say so: here rank k gets k + 1 numbers from everybody.
    lengths = [to + 1 for to in range(world.size)]
    outgoing = torch.full((sum(lengths),), world.rank, device=world.device)
    incoming = torch.zeros(world.size * (world.rank + 1), dtype=outgoing.dtype, device=world.device)
    show(world, "before, uneven", outgoing)
    dist.all_to_all_single(incoming, outgoing, [world.rank + 1] * world.size, lengths)
    show(world, "after, uneven", incoming)
