"""What each rank of `phalanx bench recorder` runs.

    recorder_rank.py DIRECTORY

It is copied to a directory of its own and run there with `phalanx run`, which makes the page; never imported.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx import status
from phalanx.bench.torch_groups import agree, both_groups
from phalanx.bench.turns import Contender, Turns
from phalanx.bench.work import mlp, mlp_batch, stepper

_MOST_ROUNDS = 2000
"""Many short ones: what is looked for is less than what the machine's pace changes by from one second to the next."""
Order = Mapping[str, int]
Calls = Sequence[Callable[[], object]]
Group = Any
"""torch's process group, or what stands for one in a process that is not in it."""


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    recorded = both_groups()
    assert status.own() is not None, "phalanx run has made it"
    status.record(False)  # a group of shm notes what it does if there is a page when it is made
    unrecorded = {"shm": dist.new_group(backend="shm"), "gloo": recorded["gloo"]}
    turns = Turns(dist.barrier, agree, order["seconds"], most_rounds=_MOST_ROUNDS)
    for backend in ("shm", "gloo"):
        for what, make in (("all_reduce of 4 B", _all_reduces), ("DDP step", _steps)):
            turns.measure(f"{what}, {backend}", 0, _contenders(make, order, unrecorded[backend], recorded[backend]))
            gc.collect()  # a DDP model that is still there makes the end of the groups wait for ever, with torch 2.13
    turns.write(directory, dist.get_rank())
    dist.destroy_process_group()


def _contenders(
    make: Callable[[Group, Order], Calls], order: Order, unrecorded: Group, recorded: Group
) -> list[Contender]:
    return [
        Contender("without", make(unrecorded, order), functools.partial(status.record, False)),
        Contender("with", make(recorded, order), functools.partial(status.record, True)),
    ]


def _all_reduces(group: Group, order: Order) -> Calls:
    return [functools.partial(dist.all_reduce, torch.zeros(1), group=group)] * order["calls"]


def _steps(group: Group, order: Order) -> Calls:
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp(order["width"]), process_group=group)
    return [stepper(model, mlp_batch(order["width"]))] * order["steps"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
