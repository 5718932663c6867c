"""What the examples beside this file print with: one line, what this rank holds at some moment.

The ranks print at the same time, so the lines of different ranks may come in any order. Those of one rank keep theirs;
to read rank after rank: phalanx run --nproc-per-node 4 examples/comm/scatter.py | sort -sk2,2
"""

from typing import Any

import torch

import phalanx as px


def show(world: px.World, moment: str, value: Any) -> None:
    """Prints for example ``before  rank 1: [1, 1]``."""
    print(f"{moment:<6}  rank {world.rank}: {_plain(value)}")


def _plain(value: Any) -> Any:
    """Tensors as lists, also within a list: shorter to read, and the same on every device."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
