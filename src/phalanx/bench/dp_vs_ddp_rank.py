"""What the ranks of `phalanx bench dp-vs-ddp` run: whole training steps on several ranks, or their parts on one.

    dp_vs_ddp_rank.py DIRECTORY

It is copied to a directory of its own and run there with `phalanx run`, which makes torch know shm; never imported.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.bench.torch_groups import agree, both_groups
from phalanx.bench.turns import Contender, Span, Turns
from phalanx.parallel import data_parallel
from phalanx.parallel.replicas import Replicas, gather, replicate, run, scatter

Order = Mapping[str, Any]
Batch = tuple[Tensor, Tensor]
_PART_ROUNDS = 30


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    groups = both_groups()
    # gloo's barrier sleeps; that of shm would take a core from the contender that works in one process.
    turns = Turns(functools.partial(dist.barrier, groups["gloo"]), agree, order["seconds"])
    for name in order["models"]:
        if dist.get_world_size() == 1:
            turns.notes += _parts(name, order)
        else:
            _steps(turns, groups["gloo"], name, order)
        gc.collect()  # a DDP model that is still there makes the end of the groups wait for ever, with torch 2.13
    turns.write(directory, dist.get_rank())
    dist.destroy_process_group()


# ---- whole steps


def _steps(turns: Turns, gloo: dist.ProcessGroup, name: str, order: Order) -> None:
    rank, replicas, cores = dist.get_rank(), order["replicas"], order["cores"]
    share = max(1, cores // replicas)
    models: dict[str, nn.Module] = {
        "one thread": _model(name, order),
        "all threads": _model(name, order),
        # Not by data_parallel, which refuses it among several ranks.
        "dp": Replicas(_model(name, order), replicas),
        "dp, cores shared": Replicas(_model(name, order), replicas),
        "ddp shm": data_parallel(_model(name, order)),
        "ddp gloo": data_parallel(_model(name, order), process_group=gloo),
    }
    threads = {"one thread": 1, "all threads": cores, "dp": cores}
    batch = _batch(name, order)
    own = (batch[0].chunk(replicas)[rank], batch[1].chunk(replicas)[rank])
    contenders = []
    for contender, model in models.items():
        together = contender.startswith("ddp")
        step = _stepper(model, own if together else batch) if together or rank == 0 else _nothing
        prepare = functools.partial(torch.set_num_threads, threads.get(contender, share))
        contenders.append(Contender(contender, [step], prepare))
    size = sum(4 * parameter.numel() for parameter in models["one thread"].parameters())
    turns.measure(name, size, contenders)
    if rank == 0:
        _check_same(models)


def _nothing() -> None:
    pass


def _stepper(model: nn.Module, batch: Batch) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def _check_same(models: Mapping[str, nn.Module]) -> None:
    """Sums depend on the order of the additions, but on nothing else."""
    expected = models["one thread"].state_dict()
    for contender, model in models.items():
        for name, value in model.state_dict().items():
            if not torch.allclose(value, expected[name], rtol=1e-2, atol=1e-4):
                worst = (value - expected[name]).abs().max().item()
                raise ArithmeticError(f"after the same steps, {name} of {contender} differs by {worst:g}")


# ---- the parts of a step


def _parts(name: str, order: Order) -> list[dict[str, Any]]:
    """Notes like those of `Turns`: the parts of a step in one process with one thread, and of one with replicas."""
    found: dict[str, dict[str, list[Span]]] = {}
    share = max(1, order["cores"] // order["replicas"])
    for kind, threads, replicas in (("one thread", 1, 1), ("dp, cores shared", share, order["replicas"])):
        torch.set_num_threads(threads)
        model, batch = _model(name, order), _batch(name, order)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        spans = found.setdefault(kind, {})
        for number in range(_PART_ROUNDS):
            if number == 3:  # the first ones warm up
                spans.clear()
            for part, span in _timed_step(model, optimizer, batch, replicas):
                spans.setdefault(part, []).append(span)
    return [
        {"measure": f"{name}: {kind}", "size": 0, "contender": part, "calls": 1, "spans": spans}
        for kind, parts in found.items()
        for part, spans in parts.items()
    ]


def _timed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, replicas: int
) -> list[tuple[str, Span]]:
    """What `Replicas` does at each step, with a look at the clock in between."""
    moments: list[tuple[str, float]] = [("", time.monotonic())]

    def done(part: str) -> None:
        moments.append((part, time.monotonic()))

    optimizer.zero_grad()
    if replicas == 1:
        outputs = model(batch[0])
        done("forward")
    else:
        calls = scatter(((batch[0],), {}), replicas)
        done("scatter")
        copies = replicate(model, len(calls))
        done("replicate")
        parts = run(copies, calls)
        done("forward")
        outputs = gather(parts)
        done("gather")
    nn.functional.cross_entropy(outputs, batch[1]).backward()
    done("backward")
    optimizer.step()
    done("optimizer")
    return [(part, (before, moment)) for (_, before), (part, moment) in itertools.pairwise(moments)]


# ---- the models


def _model(name: str, order: Order) -> nn.Module:
    torch.manual_seed(0)
    return _MODELS[name][0](order)


def _batch(name: str, order: Order) -> Batch:
    torch.manual_seed(1)
    inputs = torch.randn(order["batch"], *_MODELS[name][1](order))
    return inputs, torch.randint(10, (order["batch"],))


def _stack(width: int, layers: int) -> nn.Module:
    hidden = [layer for _ in range(layers - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, width))


def _cnn(_: Order) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )


_MODELS: dict[str, tuple[Callable[[Order], nn.Module], Callable[[Order], tuple[int, ...]]]] = {
    "MLP": (lambda order: _stack(order["width"], 4), lambda order: (order["width"],)),
    "CNN": (_cnn, lambda _: (3, 32, 32)),
    "deep MLP": (lambda _: _stack(64, 40), lambda _: (64,)),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
