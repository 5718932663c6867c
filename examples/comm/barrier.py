"""Barrier: nobody goes on before everybody has come.

    phalanx run --nproc-per-node 4 examples/comm/barrier.py

It carries no data. The other collectives need none before or after them: each waits for its data.
"""

import time

from show import show

import phalanx as px

with px.init() as world:
    time.sleep(0.3 * world.rank)  # the ranks come one after the other
    # The store is the little board of keys and values that the ranks met at; add() returns the new count.
    world.store.add("have come", 1)
    show(world, "before", "has come")

    px.barrier()  # dist.barrier(), told which GPU is this rank's

    show(world, "after", f"{world.store.add('have come', 0)} of {world.size} have come")
