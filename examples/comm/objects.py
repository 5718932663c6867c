"""Broadcast, all-gather, gather and scatter of Python objects: anything that can be pickled.

    phalanx run --nproc-per-node 4 examples/comm/objects.py

Use it for settings and results, not in training steps: every object is pickled and sent in two messages. Unpickling
runs code that the sender chooses, so use it only among ranks that trust each other.
"""

from typing import Any

import torch.distributed as dist
from show import show

import phalanx as px

with px.init() as world:
    # The list is overwritten in place on all ranks but the source; its length must be the same everywhere.
    settings: list[Any] = [{"lr": 0.1}, "cosine"] if world.is_main else [None, None]
    show(world, "before broadcast", settings)
    dist.broadcast_object_list(settings, src=0)
    show(world, "after broadcast", settings)

    mine = {"rank": world.rank, "name": "abcdefgh"[: world.rank + 1]}
    show(world, "before all_gather", mine)
    everybody: list[Any] = [None] * world.size
    dist.all_gather_object(everybody, mine)
    show(world, "after all_gather", everybody)

    show(world, "before gather", mine)
    collected: list[Any] | None = [None] * world.size if world.is_main else None
    dist.gather_object(mine, collected, dst=0)
    show(world, "after gather", collected)

    tasks = [f"task {number}" for number in range(world.size)] if world.is_main else None
    show(world, "before scatter", tasks)
    task: list[Any] = [None]  # a list of one: this is where the object is put
    dist.scatter_object_list(task, tasks, src=0)
    show(world, "after scatter", task)
