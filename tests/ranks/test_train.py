"""Training loops on real ranks: metrics, the progress line, seeds, accumulation, and going on after a stop."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx as px
from phalanx import world as worlds
from phalanx.status import reading
from phalanx.world import World
from tests.conftest import Outcome

RunRanks = Callable[..., list[Any]]
Runner = Callable[..., Outcome]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_metrics_are_exact_over_uneven_shards(size: int, run_ranks: RunRanks) -> None:
    """Seven samples on five ranks: some have two, some one; the mean is that of the seven."""

    def check(world: World) -> dict[str, float]:
        values = torch.tensor([4.0, 1.0, 0.5, 2.0, 8.0, 3.0, 2.5])
        mean, total, most, least = px.Mean(), px.Sum(), px.Max(), px.Min()
        for index in px.ShardSampler(values, shuffle=False, uneven="exact"):
            mean.update(values[index])
            for metric in (total, most, least):
                metric.update(values[index])
        before = count_collectives()
        results = px.compute_metrics(mean=mean, total=total, most=most, least=least)
        assert world.size == 1 or count_collectives() - before == 1, "one exchange for all"
        return results

    expected = {"mean": 3.0, "total": 21.0, "most": 8.0, "least": 0.5}
    assert run_ranks(check, size, backend="shm") == [expected] * size


def count_collectives() -> int:
    group: Any = dist.group.WORLD
    return group._work_queue.count


def test_a_rank_without_samples_counts_for_nothing(run_ranks: RunRanks) -> None:
    def check(world: World) -> float:
        mean = px.Mean()
        if world.rank == 1:
            mean.update(torch.tensor([1.0, 2.0]))
        return mean.compute()

    assert run_ranks(check, 3) == [1.5] * 3


# ---- seeds


class Augmented(Dataset[tuple[float, float, float]]):
    """What random numbers a worker of a loader draws, by all three libraries."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))


def test_weights_are_made_alike_and_augmentation_differs(run_ranks: RunRanks) -> None:
    def check(rank: int) -> tuple[Any, Any, Any]:
        with px.init(seed=5):
            same = [random.random(), float(numpy.random.rand()), nn.Linear(2, 2).weight.flatten().tolist()]
            model = px.data_parallel(nn.Linear(2, 2))
            del model
            own = [random.random(), float(numpy.random.rand()), float(torch.rand(1))]
            loader = DataLoader(Augmented(), batch_size=None, num_workers=1)
            workers = [tuple(item) for item in loader]
            worlds.diverge()  # once only: a second call changes nothing
            return same, own, workers

    results = run_ranks(check, 3, join_group=False)
    assert results[0][0] == results[1][0] == results[2][0]
    for place in range(3):
        assert len({result[1][place] for result in results}) == 3
    drawn = [item for result in results for item in result[2]]
    assert len(drawn) == len(set(drawn)) == 12


def test_a_seed_gives_the_same_run_again(run_ranks: RunRanks) -> None:
    def check(rank: int) -> tuple[float, float]:
        with px.init(seed=9):
            first = float(torch.rand(1))
            for _ in px.track([1], quiet=True):
                pass
            return first, float(torch.rand(1))

    one, two = run_ranks(check, 2, join_group=False), run_ranks(check, 2, join_group=False)
    assert one == two
    assert one[0][1] != one[1][1]


# ---- accumulation


def test_parts_are_exchanged_once_a_step(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[list[int], list[float]]:
        torch.manual_seed(0)
        model = px.data_parallel(nn.Linear(3, 1), broadcast_buffers=False)
        parts = px.accumulate(model, every=2)
        for _ in range(2):  # DDP arranges its buckets anew after the first
            model(torch.ones(1, 3)).sum().backward()
        exchanges = []
        for number in range(4):
            before = count_collectives()
            with parts:
                model(torch.full((2, 3), float(number + world.rank))).mean().backward()
            exchanges.append(count_collectives() - before)
        gradient = next(iter(model.parameters())).grad
        assert gradient is not None
        return exchanges, gradient.flatten().tolist()

    (one, gradient), (two, other) = run_ranks(check, 2, backend="shm")
    assert one == two == [0, 1, 0, 1]
    assert gradient == other


# ---- going on


def train_until(world: World, length: int, batch: int, stop: int | None, state: Any, workers: int) -> tuple[list, Any]:
    """The samples that the loop was given, and the sampler's state where it stopped."""
    data = TensorDataset(torch.arange(length))
    sampler = px.ShardSampler(data, seed=3, uneven="exact")
    if state is not None:
        sampler.load_state_dict(state)
    loader = DataLoader(
        data, batch_size=batch, sampler=sampler, num_workers=workers, prefetch_factor=4 if workers else None
    )
    seen: list[int] = []
    for step, (numbers,) in enumerate(px.track(loader, epoch=2, quiet=True)):
        seen += numbers.tolist()
        if step + 1 == stop:
            break
    return seen, sampler.state_dict()


@pytest.mark.parametrize(("first", "second", "workers"), [(2, 3, 0), (3, 1, 2), (1, 2, 2)])
def test_after_a_stop_every_other_sample_comes_once(first: int, second: int, workers: int, run_ranks: RunRanks) -> None:
    """On another number of ranks, and though the workers of the loader had fetched more than the loop was given."""
    before = run_ranks(train_until, first, 101, 4, 5, None, workers)
    assert all(state == before[0][1] for _, state in before)
    state = before[0][1]
    assert state["consumed"] == first * 4 * 5
    after = run_ranks(train_until, second, 101, 4, None, state, workers)
    counts = Counter(number for seen, _ in [*before, *after] for number in seen)
    assert counts == Counter(range(101))
    assert all(end["consumed"] == 101 for _, end in after)


# ---- under the launcher

SCRIPT = """
import time, torch, phalanx as px
with px.init() as world:
    loader = [torch.ones(4) * (world.rank + 1)] * 30
    for epoch in range(2):
        for x in px.track(loader, epoch=epoch):
            torch.distributed.all_reduce(torch.ones(1))
            time.sleep(0.05 if world.rank == 1 else 0.01)
            px.log(loss=x.mean())
"""


def test_the_line_and_the_files_of_a_run(phalanx: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    outcome = phalanx("run", "--nproc-per-node", "3", "train.py")
    assert outcome.code == 0, outcome.err
    lines = re.findall(r"\[rank 0\] (epoch (\d), step 30/30, .*)", outcome.err)
    assert [epoch for _, epoch in lines] == ["0", "1"]
    for line, _ in lines:
        assert ", loss 2, " in line, "the mean of 1, 2 and 3"
        assert "slowest rank 1 (+" in line
    (directory,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir() and not path.is_symlink())
    for rank in range(3):
        events = [json.loads(line) for line in (directory / f"rank-{rank}.events.jsonl").read_text().splitlines()]
        assert [event["epoch"] for event in events if event["event"] == "epoch"] == [0, 1]
        assert events[-1]["values"] == {"loss": rank + 1}
        assert events[-1]["samples"] == 120
        page = reading.read(directory / f"rank-{rank}.status")
        assert page is not None
        assert (page.epoch, page.step, page.phase) == (1, 30, "done")


def test_a_rank_that_leaves_its_loop_early_holds_nobody_up(run_ranks: RunRanks) -> None:
    def check(world: World) -> int:
        steps = 0
        for _ in px.track(range(5), epoch=0):
            steps += 1
            if world.rank == 1 and steps == 2:
                break
        dist.barrier()
        return steps

    assert run_ranks(check, 2) == [5, 2]
