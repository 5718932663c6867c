"""What the programs of this directory share, on top of `phalanx.bench`.

python benchmarks/X.py [flags]            measures; results/X-DATE.json and .md are written beside this file
python benchmarks/X.py --rank DIRECTORY   what each measured process runs; the program starts it
"""

import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.bench.commands import run_until_interrupted
from phalanx.bench.common import Benchmark
from phalanx.bench.ranks import Groups, Turns, agree, both_groups
from phalanx.errors import PhalanxError

Batch = tuple[Tensor, Tensor]
HERE = Path(__file__).parent
Order = dict[str, Any]  # what a rank is told to measure


def main(benchmark: Benchmark, rank: Callable[[Path], None] | None = None, argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if rank and argv[:1] == ["--rank"]:
        rank(Path(argv[1]))
        return 0
    name = f"benchmarks/{benchmark.name.replace('-', '_')}.py"
    try:
        settings = benchmark.parse(argv, f"python {name}", HERE / "results")
        return run_until_interrupted(lambda: benchmark.run(settings))
    except PhalanxError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def read_order(directory: Path) -> Order:
    return json.loads((directory / "order.json").read_text())


def run_rank(measure: Callable[[Turns, Groups, Order], None], directory: Path, barrier: str = "shm") -> None:
    """Joins through shm and gloo, measures, and leaves this rank's times. ``barrier``: the group that passes them."""
    order, groups = read_order(directory), both_groups()
    turns = Turns(lambda: dist.barrier(groups[barrier]), agree, order["seconds"])
    measure(turns, groups, order)
    gc.collect()  # with torch 2.13 a DDP model that is still there makes the end of the groups wait for ever
    turns.write(directory, dist.get_rank())
    dist.destroy_process_group()


def stepper(model: nn.Module, batch: Batch, lr: float = 1e-3) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    return step


def check_same(models: dict[str, nn.Module], names: Sequence[str], rtol: float = 1e-3, atol: float = 1e-5) -> None:
    """These took the same steps. Sums of several ranks depend on the order of the additions, but on nothing else."""
    expected = list(models[names[0]].named_parameters())
    for other in names[1:]:
        for (name, mine), its in zip(expected, models[other].parameters(), strict=True):
            if not torch.allclose(mine, its, rtol=rtol, atol=atol):
                worst = (mine - its).abs().max().item()
                raise ArithmeticError(f"after the same steps, {name} of {names[0]} and {other} differ by {worst:g}")


def mlp(width: int, layers: int = 3) -> nn.Module:
    found = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*found[:-1])


def mlp_batch(width: int) -> Batch:
    return torch.randn(8, width), torch.randint(width, (8,))
