"""Barrier: no rank continues before all ranks have reached it.

    phalanx run --nproc-per-node 4 examples/comm/barrier.py

It carries no data. Other collectives need no barrier before or after them: each waits for its data.
"""

import time

from show import show

import phalanx as px

with px.init() as world:
    time.sleep(0.3 * world.rank)  # the ranks arrive one after the other
    # The store holds keys and values that all ranks share; add() returns the new count.
    world.store.add("have come", 1)
    show(world, "before", "has come")

    px.barrier()  # dist.barrier() with this rank's GPU

    show(world, "after", f"{world.store.add('have come', 0)} of {world.size} have come")
