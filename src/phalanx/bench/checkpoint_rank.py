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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

import phalanx as px

_TENSORS = 16


class Weights(nn.Module):
    """As many bytes as are wanted, in tensors of two dimensions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        columns = 1000
        rows = size // (4 * columns * _TENSORS)
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(rows, columns)) for _ in range(_TENSORS))

    def become(self, number: int) -> None:
        with torch.no_grad():
            for layer in self.layers:
                layer.fill_(number)


Way = Callable[[int, Path], Callable[[], object]]
"""Saves a step into a directory; what it returns waits until that is durable."""


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    size = order["megabytes"] * 10**6
    with px.init() as world:
        model = Weights(size)
        ways = _ways(model, directory)
        spans: dict[str, dict[str, list[tuple[float, float]]]] = {"held up": {}, "durable": {}}
        for number in range(1, order["rounds"] + 2):
            model.become(number)
            names = list(ways) if number % 2 else list(reversed(ways))
            for name in names:
                place = _place(directory, name, number)
                held, durable = _turn(ways[name], number, place)
                if number > 1:  # the first has to ask for memory and to make connections
                    spans["held up"].setdefault(name, []).append(held)
                    spans["durable"].setdefault(name, []).append(durable)
                if world.is_main and number <= order["rounds"]:
                    shutil.rmtree(place)
                px.barrier()
        if world.is_main:
            _check(model, directory, list(ways), order["rounds"] + 1)
        notes = [
            {"measure": measure, "size": size, "contender": name, "calls": 1, "spans": found[name]}
            for measure, found in spans.items()
            for name in ways
        ]
        (directory / f"rank-{world.rank}.json").write_text(json.dumps(notes))


def _turn(way: Way, number: int, place: Path) -> tuple[tuple[float, float], tuple[float, float]]:
    px.barrier()
    started = time.monotonic()
    wait = way(number, place)
    returned = time.monotonic()
    wait()
    ended = time.monotonic()
    px.barrier()
    return (started, returned), (started, ended)


def _ways(model: Weights, directory: Path) -> dict[str, Way]:
    # DCP's collectives run in a thread beside those of training, so they have a group of their own.
    group = dist.new_group(backend="gloo")
    return {
        "px.Checkpointer": _ours(model, _place(directory, "px.Checkpointer", 0).parent),
        "torch.save on rank 0": lambda _, place: _torch_save(model, place),
        "DCP save": lambda _, place: _dcp_save(model, place, group),
        "DCP async_save": lambda _, place: _dcp_async(model, place, group),
    }


def _place(directory: Path, name: str, number: int) -> Path:
    """Where a contender's files of one round are."""
    return directory / name.replace(" ", "-") / f"step-{number}"


def _ours(model: Weights, path: Path) -> Way:
    """One checkpointer for all rounds, as a run has it. What it has saved is removed as for the others."""
    checkpointer = px.Checkpointer(path, keep=None)

    def save(number: int, _: Path) -> Callable[[], object]:
        checkpointer.save(number, model=model)
        return checkpointer.wait

    return save


def _torch_save(model: Weights, place: Path) -> Callable[[], object]:
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
        with (place / "state.pt").open("wb") as file:
            torch.save({"model": model.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()  # at the next step the others wait for rank 0
    return lambda: None


def _dcp_save(model: Weights, place: Path, group: Any) -> Callable[[], object]:
    dcp.save({"model": model.state_dict()}, checkpoint_id=place, process_group=group)
    return lambda: None


def _dcp_async(model: Weights, place: Path, group: Any) -> Callable[[], object]:
    saving: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=place, process_group=group)
    return getattr(saving, "upload_completion", saving).result


def _check(model: Weights, directory: Path, names: list[str], number: int) -> None:
    """Every last checkpoint has what was saved."""
    for name in names:
        place = _place(directory, name, number)
        found: dict[str, Any] = {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
        if name.startswith("torch.save"):
            found = torch.load(place / "state.pt", weights_only=True)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this is done by one process
                dcp.load(found, checkpoint_id=place, no_dist=True)
        if not all((value == number).all() for value in found["model"].values()):
            raise ArithmeticError(f"{name} has not saved what it was given")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
