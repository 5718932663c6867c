"""Prints what a rank holds at some moment, in one line, for the examples in this directory.

The ranks print at the same time, so their lines may come in any order; those of one rank stay in order. To sort them by
rank: phalanx run --nproc-per-node 4 examples/comm/scatter.py | sort -sk2,2
"""

from typing import Any

import torch

import phalanx as px


def show(world: px.World, moment: str, value: Any) -> None:
    """Prints for example ``before  rank 1: [1, 1]``."""
    print(f"{moment:<6}  rank {world.rank}: {_plain(value)}")


def _plain(value: Any) -> Any:
    """Converts tensors to lists, also within a list, so that they print the same on every device."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
