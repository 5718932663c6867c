"""What the ranks of `phalanx bench nodes` run: all_reduce and steps of DDP, through shm and flat gloo, taking turns.

    nodes_rank.py DIRECTORY

It is copied to a directory of its own and run there with `phalanx run` on each node; never imported.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.torch_groups import Groups, agree, both_groups
from phalanx.bench.turns import Contender, Turns, calls_of
from phalanx.bench.work import all_reduce, check_same, mlp, mlp_batch, stepper


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    groups = both_groups()
    turns = Turns(dist.barrier, agree, order["seconds"])
    for size in order["sizes"]:
        turns.measure(f"all_reduce over {order['link']}", size, list(all_reduce(groups, calls_of(size, order), size)))
    _measure_steps(turns, groups, order["link"], order["width"])
    gc.collect()  # a DDP model that is still there makes the end of the groups wait for ever, with torch 2.13
    turns.write(directory, dist.get_rank())
    dist.destroy_process_group()


def _measure_steps(turns: Turns, groups: Groups, link: str, width: int) -> None:
    models: dict[str, nn.Module] = {}
    for name in ("alone", *groups):
        torch.manual_seed(0)
        model = mlp(width)
        models[name] = model if name == "alone" else DistributedDataParallel(model, process_group=groups[name])
    torch.manual_seed(1 + dist.get_rank())
    batch = mlp_batch(width)
    size = 4 * sum(parameter.numel() for parameter in models["alone"].parameters())
    turns.measure(
        f"DDP step over {link}", size, [Contender(name, [stepper(each, batch)]) for name, each in models.items()]
    )
    check_same(models["shm"], models["gloo"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
