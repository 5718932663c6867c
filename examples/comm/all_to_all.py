"""All-to-all: every rank sends a part to every rank. As a matrix with one row for each rank, it is transposed.

    phalanx run --nproc-per-node 4 examples/comm/all_to_all.py

The list form, dist.all_to_all, does the same; older versions of gloo do not support it.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    # The number at index k is for rank k. Its value is 10 × sender + receiver.
    outgoing = 10 * world.rank + torch.arange(world.size, device=world.device)
    incoming = torch.zeros_like(outgoing)
    show(world, "before", outgoing)
    dist.all_to_all_single(incoming, outgoing)
    show(world, "after", incoming)

    # The parts may differ in length, if both sides give the lengths: here rank k gets k + 1 numbers from each rank.
    lengths = [to + 1 for to in range(world.size)]
    outgoing = torch.full((sum(lengths),), world.rank, device=world.device)
    incoming = torch.zeros(world.size * (world.rank + 1), dtype=outgoing.dtype, device=world.device)
    show(world, "before, uneven", outgoing)
    dist.all_to_all_single(incoming, outgoing, [world.rank + 1] * world.size, lengths)
    show(world, "after, uneven", incoming)
