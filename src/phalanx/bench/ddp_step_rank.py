"""What the ranks of `phalanx bench ddp-step` run: training steps of the same model through shm, gloo, and nothing.

    ddp_step_rank.py DIRECTORY

It is copied to a directory of its own and run there with `phalanx run`, which makes torch know shm; never imported.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.ddp_step_table import PLAIN
from phalanx.bench.torch_groups import Groups, agree, both_groups
from phalanx.bench.turns import Contender, Turns
from phalanx.bench.work import Batch, check_same, mlp, mlp_batch, stepper
from phalanx.parallel import data_parallel


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    groups = both_groups()
    turns = Turns(dist.barrier, agree, order["seconds"])
    for name in order["models"]:
        if "only" in order:
            _measure_one(turns, groups, name, order)
        else:
            _measure(turns, groups, name, order["width"])
        gc.collect()  # a DDP model that is still there makes the end of the groups wait for ever, with torch 2.13
    turns.write(directory, dist.get_rank())
    dist.destroy_process_group()


def _measure(turns: Turns, groups: Groups, name: str, width: int) -> None:
    """All contenders take the same steps on the same data, so the models that do communicate must stay the same."""
    make, sample = _MODELS[name]
    models: dict[str, nn.Module] = {}
    for contender in ("alone", "buckets", *groups):
        torch.manual_seed(0)
        model = make(width)
        models[contender] = model if contender == "alone" else _wrap(model, contender, groups)
    torch.manual_seed(1 + dist.get_rank())
    batch = sample(width)
    gradients = torch.ones(sum(parameter.numel() for parameter in models["alone"].parameters()))
    reduce = functools.partial(dist.all_reduce, gradients, op=dist.ReduceOp.AVG, group=groups["shm"])
    contenders = [Contender(each, [stepper(model, batch)]) for each, model in models.items()]
    turns.measure(name, 4 * gradients.numel(), [*contenders, Contender("all_reduce", [reduce])])
    check_same(models["shm"], models["gloo"])


def _measure_one(turns: Turns, groups: Groups, name: str, order: dict[str, Any]) -> None:
    """One way to wrap the model, in processes that hold no other: page faults are a part of its steps."""
    make, sample = _MODELS[name]
    backend, wrapper = order["only"].split(", ")
    wrap = DistributedDataParallel if wrapper == PLAIN else data_parallel
    torch.manual_seed(0)
    model = wrap(make(order["width"]), process_group=groups[backend])
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    turns.measure(name, size, [Contender(order["only"], [stepper(model, sample(order["width"]))])])


def _wrap(model: nn.Module, contender: str, groups: Groups) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model, process_group=groups.get(contender, groups["shm"]))
    if contender == "buckets":
        # A lambda, for DDP compares annotations, and in this file they are strings.
        wrapped.register_comm_hook(None, lambda _, bucket: _as_it_came(bucket))
    return wrapped


def _as_it_came(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP copies gradients into its buckets and back as always; what is in between is left out."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# ---- the models


_VOCABULARY = 256


def _transformer(width: int) -> nn.Module:
    """Six layers; 10.8 million parameters when the MLP's width is 2048."""
    inner = width * 3 // 16
    layer = nn.TransformerEncoderLayer(inner, nhead=6, dim_feedforward=4 * inner, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(_VOCABULARY, inner), encoder, nn.Linear(inner, _VOCABULARY))


def _transformer_batch(_: int) -> Batch:
    return torch.randint(_VOCABULARY, (4, 64)), torch.randint(_VOCABULARY, (4, 64))


_MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Batch]]] = {
    "MLP": (mlp, mlp_batch),
    "transformer": (_transformer, _transformer_batch),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
