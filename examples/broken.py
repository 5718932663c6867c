"""A script with a mistake on one rank, to show how a failed run ends.

phalanx run --nproc-per-node 4 examples/broken.py
"""

import torch
import torch.distributed as dist

import phalanx as px


def check(labels: torch.Tensor, classes: int) -> None:
    largest = int(labels.max())
    if largest >= classes:
        raise ValueError(f"label {largest} is not below {classes}")


with px.init() as world:
    for step in range(5):
        labels = torch.arange(4) + 2 * world.rank * (step == 3)
        print(f"step {step}: labels {labels.tolist()}")
        check(labels, classes=8)
        dist.all_reduce(labels)  # the other ranks wait here for the one that failed
