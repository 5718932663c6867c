"""Checkpoints on real ranks: a run that was stopped and goes on is the run that was not stopped."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import phalanx as px
from phalanx.errors import CheckpointError, UsageError
from phalanx.world import World
from tests.conftest import REPOSITORY, Runner
from tests.ranks.test_examples import perform

RunRanks = Callable[..., list[Any]]
_SAMPLES = 90


class Noisy(Dataset[tuple[Tensor, int]]):
    """Every sample is drawn with the random numbers of python, numpy and torch."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = random.random() + np.random.rand() + torch.rand(8)
        return torch.full((8,), float(index)) / _SAMPLES + noise, index


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 600), nn.BatchNorm1d(600), nn.Dropout(0.5), nn.Linear(600, 600), nn.Linear(600, 1)
    )


class Training:
    """A loop with everything that has a state."""

    def __init__(self, world: World, batch: int = 3, wrap: Callable[[nn.Module], nn.Module] = px.data_parallel) -> None:
        torch.set_num_threads(1)
        self.data = Noisy()
        self.sampler = px.ShardSampler(self.data, seed=3, uneven="exact")
        self.loader = DataLoader(self.data, batch_size=batch, sampler=self.sampler)
        model = wrap(net())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4, 9], gamma=0.5)
        self.state = px.State(model=model, optimizer=optimizer, scheduler=scheduler, sampler=self.sampler)
        self.seen: list[int] = []
        self.losses: list[float] = []

    def run(self, path: str, until: int, every: int | None = None, begin: int | None = None) -> None:
        state = self.state
        with px.Checkpointer(path, keep=None, every=every) as checkpointer:
            if begin is None:
                checkpointer.load_latest(state)
            else:
                checkpointer.load(begin, state)
            for epoch in itertools.count(self.sampler.epoch):
                for x, indices in px.track(self.loader, epoch=epoch, quiet=True):
                    self._step(x)
                    self.seen += indices.tolist()
                    state.step += 1
                    checkpointer.save(state)
                    if state.step == until:
                        return

    def _step(self, x: Tensor) -> None:
        loss = self.state.model(x).square().mean()  # type: ignore[misc]
        self.state.optimizer.zero_grad()
        loss.backward()
        self.state.optimizer.step()
        self.state.scheduler.step()
        self.losses.append(loss.item())

    def weights(self) -> dict[str, bytes]:
        assert self.state.model is not None
        return {name: value.numpy().tobytes() for name, value in self.state.model.state_dict().items()}


def train(world: World, path: str, until: int, every: int, begin: int | None) -> tuple[Any, ...]:
    training = Training(world)
    training.run(path, until, every, begin)
    rates = [group["lr"] for group in training.state.optimizer.param_groups]
    return training.seen, training.losses, training.weights(), rates


def test_a_run_that_goes_on_is_the_same_bit_for_bit(run_ranks: RunRanks, tmp_path: Path) -> None:
    """From within an epoch of 15 steps, and from its end."""
    whole = run_ranks(seeded(train), 2, str(tmp_path / "whole"), 20, 100, None)
    run_ranks(seeded(train), 2, str(tmp_path / "run"), 15, 5, None)
    for begin in (5, 15):
        rest = run_ranks(unseeded(train), 2, str(tmp_path / "run"), 20, 100, begin)
        for (seen, losses, weights, rates), (*later, later_weights, later_rates) in zip(whole, rest, strict=True):
            assert later == [seen[-len(later[0]) :], losses[begin:]]
            assert len(later[1]) == 20 - begin
            assert later_weights == weights
            assert later_rates == rates
    assert whole[0][1] != whole[1][1]


def seeded(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(world: World, *args: Any) -> Any:
        torch.manual_seed(world.rank)
        random.seed(world.rank)
        np.random.seed(world.rank)
        return function(world, *args)

    return run


def unseeded(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(world: World, *args: Any) -> Any:
        torch.seed()
        random.seed()
        np.random.seed()
        return function(world, *args)

    return run


def test_other_numbers_of_ranks_see_every_sample_once(run_ranks: RunRanks, tmp_path: Path) -> None:
    def go_on(world: World, path: str, until: int) -> tuple[list[int], dict[str, bytes]]:
        training = Training(world, batch=2)
        training.run(path, until)
        return training.seen, training.weights()

    def draw(world: World, path: str) -> list[float]:
        assert px.Checkpointer(path).load_latest() is not None
        return [torch.rand(1).item(), random.random(), np.random.rand()]

    path = str(tmp_path / "run")
    seen: list[int] = []
    for ranks, until in ((1, 5), (2, 11), (3, 19), (1, 23)):  # 10, 24, 48 and 8 samples
        results = run_ranks(go_on, ranks, path, until)
        seen += [index for result in results for index in result[0]]
        parameters = [{k: v for k, v in result[1].items() if "running" not in k} for result in results]
        assert all(each == parameters[0] for each in parameters)
    assert Counter(seen) == Counter(range(_SAMPLES))
    # The random numbers of a world of another size: each rank has its own, and they are the same the next time.
    first, second = run_ranks(unseeded(draw), 2, path), run_ranks(unseeded(draw), 2, path)
    assert first == second
    assert not set(first[0]) & set(first[1])


def test_any_model_loads_it_and_so_does_torch(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Saved by two ranks; loaded by one process, by plain DDP, compiled, by plain DCP; compared with torch.save."""

    def save(world: World, path: str) -> tuple[str, list[int]]:
        torch.manual_seed(0)
        training = Training(world)
        training.run(path, 4)
        state = training.state
        assert state.model is not None
        if world.is_main:
            average = state.optimizer.state[next(iter(state.model.parameters()))]["exp_avg"]
            torch.save({**state.model.state_dict(), "optimizer": average}, f"{path}.pt")
        px.barrier()
        with px.Checkpointer(path, every="1h") as checkpointer:
            state.extra |= {"scores": {1: [0.5]}, "other": nn.Linear(2, 2)}
            assert not checkpointer.save(state)
            assert checkpointer.save(state, force=True)
        mean = state.model.state_dict()["1.running_mean"].tolist()
        return json.dumps(mean), [os.stat(f"{path}/step-4/rank-{rank}.safetensors").st_size for rank in range(2)]

    path = str(tmp_path / "run")
    (zero, sizes), (one, _) = run_ranks(save, 2, path)
    assert zero != one  # so it matters that buffers are rank 0's
    assert max(sizes) < 1.2 * min(sizes)
    want = torch.load(f"{path}.pt", weights_only=True)

    def check(model: nn.Module) -> px.State:
        optimizer = torch.optim.Adam(model.parameters())
        state = px.Checkpointer(path).load_latest(model=model, optimizer=optimizer)
        assert state is not None
        for name, value in model.state_dict().items():
            assert torch.equal(value, want[name.removeprefix("module.").removeprefix("_orig_mod.")]), name
        assert len(optimizer.state) == 8
        return state

    def load(world: World) -> None:
        torch.set_num_threads(1)
        check(nn.parallel.DistributedDataParallel(net()))
        check(px.data_parallel(net()))
        check(torch.compile(net()))  # type: ignore[arg-type]

    run_ranks(load, 2, backend="gloo")
    state = check(net())
    assert (state.step, state.extra["scores"]) == (4, {1: [0.5]})
    _check_plain_torch(Path(path, "step-4"), want)


def _check_plain_torch(directory: Path, want: dict[str, Tensor]) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    model = net()
    optimizer = {"state": {"0.weight": {"exp_avg": torch.zeros(600, 8)}}}
    given: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: that there is no process group
        dcp.load(given, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    assert all(torch.equal(value, want[name]) for name, value in given["model"].items())
    saved = torch.load(f"{directory.parent}.pt", weights_only=True)
    assert torch.equal(optimizer["state"]["0.weight"]["exp_avg"], saved["optimizer"])


def test_errors_are_the_same_on_all_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    def check(world: World, path: str) -> list[str]:
        told: list[str] = []

        def tells(kind: type[Exception]) -> contextlib.AbstractContextManager[None]:
            return _telling(kind, told)

        checkpointer = px.Checkpointer(path, keep=5)
        checkpointer.save(1 + world.rank)
        with tells(CheckpointError):
            checkpointer.wait()
        checkpointer.save(5, extra={"x": 1} if world.is_main else {"x": 1, "y": 2})  # objects are rank 0's
        checkpointer.save(6, model=nn.Linear(2, 2 + world.rank))
        with tells(CheckpointError):
            checkpointer.save(7)
        checkpointer.save(8)
        checkpointer.close()
        with tells(UsageError):
            px.Checkpointer(path).save(3)
        with tells(CheckpointError):
            px.Checkpointer(path).load(6)
        px.barrier()
        if world.rank == 1:  # what one rank cannot read, none loads
            name = f"{path}/step-8/rank-1.safetensors"
            os.truncate(name, os.stat(name).st_size)
            with open(name, "r+b") as file:
                file.write(b"x")
        px.barrier()
        state = px.Checkpointer(path).load_latest()
        assert state is not None
        # The world is left while a save is under way.
        px.Checkpointer(f"{path}-last").save(1, model=nn.Linear(500, 500))
        return [*told, str(state.step)]

    path = str(tmp_path / "run")
    first, second = run_ranks(check, 2, path)
    assert first == second
    assert first[0].startswith("rank 0 saves step 1 and rank 1 saves step 2; save on all ranks alike")
    assert first[1].startswith("at step 6 rank 0 and rank 1 save different names, types or shapes")
    assert "has a checkpoint of step 8, and step 3 is to be saved" in first[2]
    assert first[3].endswith("has no checkpoint of step 6; there are: 5, 8.")
    assert first[4] == "5"
    assert sorted(os.listdir(path)) == ["step-5", "step-8"]
    assert os.listdir(f"{path}-last") == ["step-1"]


@contextlib.contextmanager
def _telling(kind: type[Exception], told: list[str]) -> Any:
    try:
        yield
    except kind as error:
        told.append(str(error))
    else:
        raise AssertionError(f"no {kind.__name__}")


def test_the_script_of_the_documentation_goes_on_after_a_kill(
    tmp_path: Path, phalanx: Runner, run_ranks: RunRanks
) -> None:
    """Rank 1 is killed once, in the first epoch or in the second; the weights at the end are those of a quiet run."""
    page = (REPOSITORY / "docs/recovery.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "quiet.py").write_text(script.replace('"checkpoints"', f'"{tmp_path}/quiet"'))
    kill = (
        "                import os; state.step == 75 and world.rank and os.path.exists('fuse') and (os.remove('fuse'), "
    )
    kill += "os.kill(os.getpid(), 9))\n"
    place = "                checkpointer.save(state)"
    assert place in script
    (tmp_path / "killed.py").write_text(script.replace(place, kill + place))
    (tmp_path / "fuse").touch()
    printed, _ = run_ranks(perform, 2, str(tmp_path / "quiet.py"), (), {}, join_group=False)
    quiet = [f"[rank 0] {line}" for line in printed.splitlines() if "step" in line and "epoch" not in line]
    outcome = phalanx("run", "--nproc-per-node", "2", "--max-restarts", "1", "killed.py")
    assert outcome.code == 0, outcome.err
    first, again, end = [line for line in outcome.lines if "step" in line and "epoch" not in line]
    assert quiet == [first, end]
    assert re.fullmatch(r"\[rank 0\] from step 0", first)
    assert re.fullmatch(r"\[rank 0\] from step (60|70)", again)
    assert not (tmp_path / "fuse").exists()
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["step-100", "step-80", "step-90"]


def test_the_run_directory_tells_of_saves_and_loads(run_ranks: RunRanks, tmp_path: Path) -> None:
    def work(world: World, path: str) -> None:
        os.environ["PHALANX_RUN_DIR"] = path
        with px.Checkpointer(f"{path}/kept", every="0.5s") as checkpointer:
            assert not checkpointer.save(1)
            saved = next(step for step in itertools.count(2) if _slow_save(checkpointer, step))
            state = checkpointer.load_latest()
            assert state is not None
            assert state.step == saved

    run_ranks(work, 2, str(tmp_path))
    events = [
        [json.loads(line) for line in (tmp_path / f"rank-{rank}.events.jsonl").read_text().splitlines()]
        for rank in range(2)
    ]
    names = [[event["event"] for event in each] for each in events]
    assert sorted(names) == [["saving", "loaded"], ["saving", "saved", "loaded"]]
    steps = {event["step"] for each in events for event in each}
    assert len(steps) == 1
    assert all("seconds" in event for each in events for event in each)


def _slow_save(checkpointer: px.Checkpointer, step: int) -> bool:
    import time

    time.sleep(0.0008)
    return checkpointer.save(step)
