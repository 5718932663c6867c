"""How long a checkpoint holds a training loop up, what it takes from the steps after it, and when it is on the disk.

px.Checkpointer beside torch.distributed.checkpoint (DCP) and torch.save on rank 0. DCP's async_save runs with its
strongest settings (a process that writes, asynchronous staging into shared memory, cached plans) and as it comes.
They take turns in the same processes, on the same disk, and save the same state: weights and as much momentum of SGD.
Held up: from the call to its return. After: steps of training that follow at once, beside as many without a save; the
loop waits for the copy before it changes the weights. Durable: until every rank knows that the files are synced, by a
save that is waited for. At the end every contender saves once more, a step follows at once, and what was saved is
compared with what was there before that step.
"""

import itertools
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import main, read_order
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils._pytree import tree_map_only

import phalanx as px
from phalanx.bench.commands import Settings, Step, job
from phalanx.bench.common import MB, Benchmark, Flag, Row, compare, counts, positive
from phalanx.bench.ranks import Contender, Turns, do_nothing

OURS = "px.Checkpointer"
CONTENDERS = (OURS, "DCP async_save, process", "DCP async_save", "DCP save", "torch.save on rank 0")
ASYNC = CONTENDERS[:3]  # after these, and after nothing, some steps are trained
NOTHING = "no save"
LAYERS, WIDTH, BATCH = 16, 1000, 8


def plan(settings: Settings) -> Iterator[Step]:
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            for size in settings.megabytes:
                order = {"megabytes": size, "rounds": settings.rounds, "steps": settings.steps}
                yield job(f"{size} MB", (__file__, "--rank"), ranks, order, (repeat, settings))


def tables(rows: Sequence[Row], _: Settings) -> list[str]:
    names = ("held up", "after", "durable")
    held, after, durable = ([row for row in rows if row.measure == name] for name in names)
    ratios, costs = [(name, OURS) for name in CONTENDERS[1:]], [(name, NOTHING) for name in ASYNC]
    return [
        compare("How long the loop is held up", held, CONTENDERS, ratios),
        compare("How much longer the steps after it take", after, (NOTHING,), costs=costs),
        compare("How long until it is on the disk", durable, CONTENDERS, ratios),
    ]


class Training:
    """A loop with a state of as many bytes as are wanted: weights, and as much momentum.

    All ranks compute the same, so they stay equal without a collective, and meet at the end of each step.
    """

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        rows = size // (2 * 4 * WIDTH * LAYERS)
        self.model = nn.ModuleList(nn.Linear(WIDTH, rows, bias=False) for _ in range(LAYERS))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self._input = torch.rand(BATCH, WIDTH)

    def step(self, before_update: Callable[[], object] = do_nothing) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        for layer in self.model:
            layer(self._input).square().mean().backward()
        before_update()
        self.optimizer.step()
        px.barrier()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def sums(state: dict[str, Any]) -> list[float]:
    momentum = [each["momentum_buffer"] for each in state["optimizer"]["state"].values()]
    return [tensor.double().sum().item() for tensor in [*state["model"].values(), *momentum]]


Save = tuple[Callable[[], object], Callable[[], object]]
"""A save under way: what waits until it is durable, and what the user has to call before the weights change."""
Way = Callable[[int, Path], Save]  # saves a step into a directory


class Saving:
    """One contender's saves, each with a number and a directory of its own, the same on all ranks."""

    numbers = itertools.count(1)

    def __init__(self, name: str, way: Way, training: Training, directory: Path) -> None:
        self.name, self._way, self._training = name, way, training
        self._parent = directory / name.replace(" ", "-").replace(",", "")

    def begin(self) -> None:
        number = next(Saving.numbers)
        self.path = self._parent / f"step-{number}"
        self.wait, self._before_update = self._way(number, self.path)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._training.step(self._before_update)

    def begin_and_wait(self) -> None:
        self.begin()
        self.wait()

    def end(self) -> None:
        self.wait()
        px.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.path, ignore_errors=True)
        px.barrier()


def rank(directory: Path) -> None:
    order = read_order(directory)
    size = order["megabytes"] * MB
    with px.init() as world:
        training = Training(size)
        for _ in range(2):
            training.step()
        saves = {name: Saving(name, way, training, directory) for name, way in ways(training, directory).items()}
        turns = Turns(px.barrier, lambda _: order["rounds"], 1.0)
        all_saves, trained = [saves[name] for name in CONTENDERS], [saves[name] for name in (NOTHING, *ASYNC)]
        turns.measure("held up", size, [Contender(each.name, [each.begin], check=each.end) for each in all_saves])
        steps = [Contender(each.name, [partial(each.train, order["steps"])], each.begin, each.end) for each in trained]
        turns.measure("after", size, steps)
        durable = [Contender(each.name, [each.begin_and_wait], check=each.end) for each in all_saves]
        turns.measure("durable", size, durable)
        for name in CONTENDERS:
            _check(training, saves[name])
        turns.write(directory, world.rank)


def ways(training: Training, directory: Path) -> dict[str, Way]:
    # One checkpointer for all rounds, as a run has it. What it has saved is removed as for the others.
    checkpointer = px.Checkpointer(directory / OURS, keep=None)
    # DCP's collectives run in a thread beside those of training, so they have a group of their own.
    group: Any = dist.new_group(backend="gloo")
    # DCP's strongest settings without a GPU: a process that writes, staging in a thread into memory that is shared
    # with it and kept, and plans that are kept.
    strongest: dict[str, Any] = {
        "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
        "async_stager": DefaultStager(StagingOptions(False, True, True, False)),
        "planner": DefaultSavePlanner(enable_plan_caching=True),
    }

    def ours(number: int, _: Path) -> Save:
        checkpointer.save(number, model=training.model, optimizer=training.optimizer)
        return checkpointer.wait, do_nothing

    def dcp_process(_: int, path: Path) -> Save:
        saving: Any = dcp.async_save(training.state(), checkpoint_id=path, process_group=group, **strongest)
        return saving.upload_completion.result, saving.staging_completion.result

    def dcp_async(_: int, path: Path) -> Save:
        saving: Any = dcp.async_save(training.state(), checkpoint_id=path, process_group=group)
        return saving.result, do_nothing

    def dcp_save(_: int, path: Path) -> Save:
        dcp.save(training.state(), checkpoint_id=path, process_group=group)
        return do_nothing, do_nothing

    def no_save(_: int, __: Path) -> Save:
        return do_nothing, do_nothing

    found = (ours, dcp_process, dcp_async, dcp_save, partial(_torch_save, training), no_save)
    return dict(zip((*CONTENDERS, NOTHING), found, strict=True))


def _torch_save(training: Training, _: int, path: Path) -> Save:
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        with (path / "state.pt").open("wb") as file:
            torch.save(training.state(), file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()  # at the next step the others wait for rank 0
    return do_nothing, do_nothing


def _check(training: Training, save: Saving) -> None:
    """What was saved is what was there, also when a step follows at once."""
    want = sums(training.state())
    save.begin()
    save.train(1)
    save.wait()
    px.barrier()
    if dist.get_rank() == 0 and _loaded(training, save.name, save.path) != want:
        raise ArithmeticError(f"{save.name} has not saved what it was given")
    px.barrier()


def _loaded(training: Training, name: str, path: Path) -> list[float]:
    if name.startswith("torch.save"):
        return sums(torch.load(path / "state.pt", weights_only=True))
    state = training.state()
    if name == OURS:
        rows: dict[str, list[torch.Tensor]] = {}
        for file in sorted(path.glob("*.safetensors")):
            for key, value in load_file(file).items():
                rows.setdefault(key, []).append(value)
        keys = [f"model.{key}" for key in state["model"]]
        keys += [f"optimizer.state.{key}.momentum_buffer" for key in state["model"]]
        return [torch.cat(rows[key]).double().sum().item() for key in keys]
    found = tree_map_only(torch.Tensor, torch.zeros_like, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is done by one process
        dcp.load(found, checkpoint_id=path, no_dist=True)
    return sums(found)


FLAGS = (
    Flag("--ranks", "A,B", counts, "2,4"),
    Flag("--megabytes", "A,B", counts, "100,1000", "of the state"),
    Flag("--rounds", "N", positive, 5, "in one job"),
    Flag("--steps", "N", positive, 20, "after a save"),
)
BENCHMARK = Benchmark("checkpoint", __doc__, plan, tables, FLAGS, timeout=600.0)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, rank))
