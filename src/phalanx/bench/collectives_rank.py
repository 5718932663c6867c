"""What the ranks of `phalanx bench collectives` run under torch: shm and gloo in the same processes, taking turns.

    collectives_rank.py DIRECTORY

It is copied to a directory of its own and run there with `phalanx run`, which makes torch know shm; never imported.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.bench import numbers
from phalanx.bench.torch_groups import Groups, agree, both_groups
from phalanx.bench.turns import Contender, Turns, calls_of
from phalanx.bench.work import all_reduce, checker, own_numbers


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    groups = both_groups()
    turns = Turns(dist.barrier, agree, order["seconds"])
    for size in order["sizes"]:
        calls = calls_of(size, order)
        turns.measure("all_reduce", size, list(all_reduce(groups, calls, size, size == order["limit"])))
    for name in order["others"]:
        turns.measure(name, order["other_size"], list(_OTHERS[name](groups, order["other_size"])))
    turns.write(directory, dist.get_rank())
    dist.destroy_process_group()


# ---- the others; ``size`` is that of the larger side: what all_gather gives and reduce_scatter takes


def _broadcast(groups: Groups, size: int) -> Iterator[Contender]:
    source = own_numbers(1, size // 4)[0]
    data = torch.empty_like(source)
    expected = source / numbers.weight(dist.get_rank()) * numbers.weight(0)
    for name, group in groups.items():
        call = functools.partial(dist.broadcast, data, 0, group=group)
        check = checker(data, expected, f"broadcast with {name}")
        yield Contender(name, [call], functools.partial(data.copy_, source), check)


def _all_gather(groups: Groups, size: int) -> Iterator[Contender]:
    block = size // 4 // dist.get_world_size()
    source = own_numbers(1, block)[0]
    plain = source / numbers.weight(dist.get_rank())
    expected = torch.cat([plain * numbers.weight(rank) for rank in range(dist.get_world_size())])
    return _exchange(groups, "all_gather", _by_name("all_gather_single", "all_gather_into_tensor"), source, expected)


def _reduce_scatter(groups: Groups, size: int) -> Iterator[Contender]:
    block = size // 4 // dist.get_world_size()
    source = own_numbers(1, block * dist.get_world_size())[0]
    mine = source / numbers.weight(dist.get_rank()) * numbers.weight_of_all(dist.get_world_size())
    expected = mine[dist.get_rank() * block :][:block].clone()
    how = _by_name("reduce_scatter_single", "reduce_scatter_tensor")
    return _exchange(groups, "reduce_scatter", how, source, expected)


def _all_to_all(groups: Groups, size: int) -> Iterator[Contender]:
    block = size // 4 // dist.get_world_size()
    source = own_numbers(1, block * dist.get_world_size())[0]
    mine = source[dist.get_rank() * block :][:block] / numbers.weight(dist.get_rank())
    expected = torch.cat([mine * numbers.weight(rank) for rank in range(dist.get_world_size())])
    return _exchange(groups, "all_to_all", dist.all_to_all_single, source, expected)


def _by_name(name: str, older: str) -> Callable[..., object]:
    """torch 2.13 gave some of them new names."""
    return getattr(dist, name, None) or getattr(dist, older)


def _exchange(
    groups: Groups, name: str, how: Callable[..., object], source: torch.Tensor, expected: torch.Tensor
) -> Iterator[Contender]:
    output = torch.empty_like(expected)
    for backend, group in groups.items():
        call = functools.partial(how, output, source, group=group)
        # -1 is no result, so an output of the turn before cannot pass for one.
        prepare = functools.partial(output.fill_, -1)
        yield Contender(backend, [call], prepare, checker(output, expected, f"{name} with {backend}"))


_OTHERS = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
