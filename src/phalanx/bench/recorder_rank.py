"""What each rank of `phalanx bench recorder` runs.

    recorder_rank.py DIRECTORY

It is copied to a directory of its own and run there with `phalanx run`, which makes the page; never imported.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
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
_RECORD = {"without": False, "with": True}
Calls = Sequence[Callable[[], object]]
Group = Any
"""torch's process group, or what stands for one in a process that is not in it."""
Make = Callable[[Group], Calls]


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    groups = both_groups()
    assert status.own() is not None, "phalanx run has made it"
    turns = Turns(dist.barrier, agree, order["seconds"], most_rounds=_MOST_ROUNDS)
    for backend in ("shm", "gloo"):
        for what, make in _work(order):
            # One model for both: two that differ in nothing but where they lie in memory may differ by a third in pace.
            calls = make(groups[backend])
            turns.measure(f"{what}, {backend}", 0, [_contender(name, calls, groups["shm"]) for name in _RECORD])
            _record(True, groups["shm"])
            del calls
            gc.collect()  # a DDP model that is still there makes the end of the groups wait for ever, with torch 2.13
    turns.write(directory, dist.get_rank())
    dist.destroy_process_group()


def _contender(name: str, calls: Calls, shm: Group) -> Contender:
    return Contender(name, calls, functools.partial(_record, _RECORD[name], shm))


def _record(on: bool, shm: Group) -> None:
    status.record(on)
    shm.record(on)


def _work(order: dict[str, Any]) -> Iterator[tuple[str, Make]]:
    yield "all_reduce of 4 B", functools.partial(_all_reduces, order["calls"])
    for width in order["widths"]:
        yield f"DDP step, width {width}", functools.partial(_step, width)


def _all_reduces(calls: int, group: Group) -> Calls:
    tensor = torch.zeros(1)

    # From this file, as from a script: from inside of phalanx it takes a longer look to find who has asked.
    def call() -> None:
        dist.all_reduce(tensor, group=group)

    return [call] * calls


def _step(width: int, group: Group) -> Calls:
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp(width), process_group=group)
    return [stepper(model, mlp_batch(width))]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
