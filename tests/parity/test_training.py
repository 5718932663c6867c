"""Training on many ranks is the training of one process: the same global batches give the same parameters.

The reference is plain torch in one process, with the whole batch at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx as px
from phalanx import testing
from phalanx.world import World

RunRanks = Callable[..., list[Any]]
STEPS, BATCH = 20, 48  # 48 can be cut for 1 to 4 ranks, and into 4 parts for each of them
START = 0.0


@dataclass(frozen=True)
class Setting:
    optimizer: str
    parts: int
    half: bool


SETTINGS = [Setting(*choice) for choice in itertools.product(("sgd", "adamw"), (1, 4), (False, True))]

# How far a parameter may be off, as a part of the largest change that training made to any. Sums in another order
# differ by some units of the last place (6e-8) and grow with the steps; AdamW divides by the size of the gradient, so
# that tiny gradients, which are all rounding, count like others; bfloat16 rounds each part's gradients to 3 digits
# before they are added.
TOLERANCE = {("sgd", False): 1e-5, ("adamw", False): 2e-3, ("sgd", True): 2e-2, ("adamw", True): 0.3}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * BATCH, 10, generator=generator)
    return inputs, (inputs[:, :3] + 0.1 * inputs[:, 3:6]).argmax(1)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def in_one_process(setting: Setting) -> Tensor:
    """Plain torch, without accumulation: the whole batch at once."""
    model = make_model()
    optimizer = make_optimizer(setting.optimizer, model)
    inputs, labels = make_data()
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting.half):
            loss = nn.functional.cross_entropy(model(inputs[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return flat(model)


def with_phalanx(world: World, setting: Setting) -> tuple[Tensor, list[float], bool]:
    """Parameters, this rank's losses, and whether all ranks had the same bits after every step."""
    model = px.data_parallel(make_model())
    optimizer = make_optimizer(setting.optimizer, model)
    parts, amp = px.accumulate(model, every=setting.parts), px.autocast(enabled=setting.half)
    data = torch.utils.data.TensorDataset(*make_data())
    sampler = px.ShardSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH // world.size // setting.parts, sampler=sampler)
    losses, equal = [], True
    for inputs, labels in px.track(loader, epoch=0, quiet=True):
        with parts:
            with amp:
                loss = nn.functional.cross_entropy(model(inputs), labels)
            amp.backward(loss / parts.size)
        losses.append(loss.item())
        if parts.complete:
            amp.step(optimizer)
            optimizer.zero_grad()
            equal = equal and same_everywhere(flat(model), world)
    return flat(model), losses, equal


def same_everywhere(values: Tensor, world: World) -> bool:
    if world.size == 1:
        return True
    found = [torch.empty_like(values) for _ in range(world.size)]
    dist.all_gather(found, values)
    return all(torch.equal(one.view(torch.int32), values.view(torch.int32)) for one in found)


@functools.cache
def references() -> list[Tensor]:
    return testing.run_ranks(lambda world: [in_one_process(setting) for setting in SETTINGS], 1)[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_to_one_process(size: int, run_ranks: RunRanks) -> None:
    results = run_ranks(lambda world: [with_phalanx(world, setting) for setting in SETTINGS], size, timeout=120)
    start = flat(make_model())
    for place, (setting, reference) in enumerate(zip(SETTINGS, references(), strict=True)):
        parameters, _, equal = results[0][place]
        assert all(result[place][2] for result in results), f"{setting}: replicas differ"
        assert equal
        off = ((parameters - reference).abs().max() / (reference - start).abs().max()).item()
        assert off <= TOLERANCE[setting.optimizer, setting.half], f"{setting}: off by {off:.2g}"


def raw_ddp(world: World, setting: Setting) -> list[float]:
    """torch's own DDP on gloo, with everything spelled out."""
    group: Any = dist.new_group(backend="gloo")
    model = DistributedDataParallel(make_model(), process_group=group)
    optimizer = make_optimizer(setting.optimizer, model)
    inputs, labels = (tensor[world.rank :: world.size] for tensor in make_data())
    share = BATCH // world.size
    losses = []
    for step in range(STEPS):
        part = slice(step * share, (step + 1) * share)
        loss = nn.functional.cross_entropy(model(inputs[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("size", [2, 3])
def test_losses_are_those_of_torchs_own_ddp(size: int, run_ranks: RunRanks) -> None:
    def both(world: World) -> list[tuple[list[float], list[float]]]:
        return [
            (with_phalanx(world, setting)[1], raw_ddp(world, setting))
            for setting in SETTINGS
            if setting.parts == 1 and not setting.half
        ]

    for settings in run_ranks(both, size, backend="shm"):
        for ours, theirs in settings:
            if size == 2:
                assert ours == theirs
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
