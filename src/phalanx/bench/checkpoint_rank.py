"""What each rank of `phalanx bench checkpoint` runs.

    checkpoint_rank.py DIRECTORY

It is copied to a directory of its own and run there; never imported.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import phalanx as px

_LAYERS, _WIDTH, _BATCH = 16, 1000, 8
_NOTHING = "no save"
_ASYNC = ("px.Checkpointer", "DCP async_save, process", "DCP async_save")
"""After these, and after nothing, some steps are trained."""


class Training:
    """A loop with a state of as many bytes as are wanted: weights, and as much momentum.

    All ranks compute the same, so they stay equal without a collective, and meet at the end of each step.
    """

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        rows = size // (2 * 4 * _WIDTH * _LAYERS)
        self.model = nn.ModuleList(nn.Linear(_WIDTH, rows, bias=False) for _ in range(_LAYERS))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self._input = torch.rand(_BATCH, _WIDTH)

    def step(self, before_update: Callable[[], object]) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        for layer in self.model:
            layer(self._input).square().mean().backward()
        before_update()
        self.optimizer.step()
        px.barrier()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def sums(self) -> list[float]:
        momentum = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [tensor.double().sum().item() for tensor in [*self.model.parameters(), *momentum]]


@dataclass(frozen=True)
class Save:
    """A save under way."""

    wait: Callable[[], object]
    """Until it is durable."""
    before_update: Callable[[], object] = lambda: None
    """What the user has to call before the weights change. px.Checkpointer sees to that itself."""


Way = Callable[[int, Path], Save]
"""Saves a step into a directory."""


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    size = order["megabytes"] * 10**6
    with px.init() as world:
        training = Training(size)
        for _ in range(2):
            training.step(lambda: None)
        ways = _ways(training, directory)
        spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(1, order["rounds"] + 2):
            names = [*ways, _NOTHING]
            for name in names if number % 2 else reversed(names):
                places = [_place(directory, name, 2 * number + turn) for turn in (0, 1)]
                found = _rounds(training, ways.get(name), name, 2 * number, places, order["steps"])
                if number > 1:  # the first has to ask for memory and to make connections
                    for measure, span in found.items():
                        spans.setdefault((measure, name), []).append(span)
                for place in places if world.is_main else ():
                    shutil.rmtree(place, ignore_errors=True)
                px.barrier()
        _check(training, ways, directory, 2 * order["rounds"] + 4)
        notes = [
            {"measure": measure, "size": size, "contender": name, "calls": 1, "spans": found}
            for (measure, name), found in sorted(spans.items())
        ]
        (directory / f"rank-{world.rank}.json").write_text(json.dumps(notes))
        sys.stdout.flush()


def _rounds(
    training: Training, way: Way | None, name: str, number: int, places: list[Path], steps: int
) -> dict[str, tuple[float, float]]:
    """Two saves: one with training after it, one that is waited for."""
    found = {}
    if way is None or name in _ASYNC:
        px.barrier()
        started = time.monotonic()
        save = way(number, places[0]) if way is not None else Save(lambda: None)
        returned = time.monotonic()
        for _ in range(steps):
            training.step(save.before_update)
        found["after"] = (returned, time.monotonic())
        save.wait()
        if way is not None:
            found["held up"] = (started, returned)
    if way is not None:
        px.barrier()
        started = time.monotonic()
        save = way(number + 1, places[1])
        found.setdefault("held up", (started, time.monotonic()))
        save.wait()
        found["durable"] = (started, time.monotonic())
    px.barrier()
    return found


def _ways(training: Training, directory: Path) -> dict[str, Way]:
    # DCP's collectives run in a thread beside those of training, so they have a group of their own.
    group = dist.new_group(backend="gloo")
    return {
        "px.Checkpointer": _ours(training, _place(directory, "px.Checkpointer", 0).parent),
        "DCP async_save, process": _dcp_process(training, group),
        "DCP async_save": lambda _, place: _dcp_async(training, place, group),
        "DCP save": lambda _, place: _dcp_save(training, place, group),
        "torch.save on rank 0": lambda _, place: _torch_save(training, place),
    }


def _place(directory: Path, name: str, number: int) -> Path:
    """Where a contender's files of one save are."""
    return directory / name.replace(" ", "-").replace(",", "") / f"step-{number}"


def _ours(training: Training, path: Path) -> Way:
    """One checkpointer for all rounds, as a run has it. What it has saved is removed as for the others."""
    checkpointer = px.Checkpointer(path, keep=None)

    def save(number: int, _: Path) -> Save:
        checkpointer.save(number, model=training.model, optimizer=training.optimizer)
        return Save(checkpointer.wait)

    return save


def _dcp_process(training: Training, group: Any) -> Way:
    """DCP's strongest settings without a GPU: a process that writes, staging in a thread into memory that is shared
    with it and kept, and plans that are kept."""
    stager = DefaultStager(StagingOptions(False, True, True, False))
    planner = DefaultSavePlanner(enable_plan_caching=True)

    def save(_: int, place: Path) -> Save:
        saving: Any = dcp.async_save(
            training.state(),
            checkpoint_id=place,
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
            planner=planner,
        )
        return Save(saving.upload_completion.result, saving.staging_completion.result)

    return save


def _dcp_async(training: Training, place: Path, group: Any) -> Save:
    saving: Any = dcp.async_save(training.state(), checkpoint_id=place, process_group=group)
    return Save(saving.result)


def _dcp_save(training: Training, place: Path, group: Any) -> Save:
    dcp.save(training.state(), checkpoint_id=place, process_group=group)
    return Save(lambda: None)


def _torch_save(training: Training, place: Path) -> Save:
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
        with (place / "state.pt").open("wb") as file:
            torch.save(training.state(), file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()  # at the next step the others wait for rank 0
    return Save(lambda: None)


def _check(training: Training, ways: dict[str, Way], directory: Path, number: int) -> None:
    """Every contender's last checkpoint has what was saved, also when a step follows at once."""
    for name, way in ways.items():
        place = _place(directory, name, number)
        want = training.sums()
        save = way(number, place)
        training.step(save.before_update)
        save.wait()
        px.barrier()
        if dist.get_rank() == 0 and _loaded(training, name, place) != want:
            raise ArithmeticError(f"{name} has not saved what it was given")
        px.barrier()


def _loaded(training: Training, name: str, place: Path) -> list[float]:
    from safetensors.torch import load_file

    state = training.state()
    found: dict[str, Any] = {
        "model": {key: torch.zeros_like(value) for key, value in state["model"].items()},
        "optimizer": {"state": {key: {"momentum_buffer": torch.zeros_like(value["momentum_buffer"])}
                                for key, value in state["optimizer"]["state"].items()}},
    }  # fmt: skip
    if name == "px.Checkpointer":
        rows: dict[str, list[Tensor]] = {}
        for file in sorted(place.glob("*.safetensors")):
            for key, value in load_file(file).items():
                rows.setdefault(key, []).append(value)
        keys = list(state["model"])
        names = [f"model.{key}" for key in keys] + [f"optimizer.state.{key}.momentum_buffer" for key in keys]
        return [torch.cat(rows[key]).double().sum().item() for key in names]
    if name.startswith("torch.save"):
        found = torch.load(place / "state.pt", weights_only=True)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is done by one process
            dcp.load(found, checkpoint_id=place, no_dist=True)
    momentum = [state["momentum_buffer"] for state in found["optimizer"]["state"].values()]
    return [tensor.double().sum().item() for tensor in [*found["model"].values(), *momentum]]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
