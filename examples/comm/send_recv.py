"""Blocking point-to-point: a tensor is sent from rank to rank in a ring, and each rank adds its number to it.

    phalanx run --nproc-per-node 4 examples/comm/send_recv.py

`send` returns when the tensor may be changed again, `recv` when it has been filled.
"""

import torch
import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    following = (world.rank + 1) % world.size
    previous = (world.rank - 1) % world.size
    token = torch.full((2,), 100 if world.is_main else 0, device=world.device)
    show(world, "before", token)

    # One rank has to begin with send: if all began with recv, all would wait forever.
    if world.is_main:
        dist.send(token, dst=following)
        dist.recv(token, src=previous)  # it has visited all ranks now
    else:
        dist.recv(token, src=previous)
        token += world.rank
        dist.send(token, dst=following)

    show(world, "after", token)
