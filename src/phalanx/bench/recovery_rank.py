"""What the ranks of `phalanx bench recovery` run: training that saves every few steps and goes on from its last save.

    recovery_rank.py DIRECTORY

DIRECTORY/order.json says with what it saves, and after which step of the first attempt rank 1 kills itself. Without a
launcher it is the reference: one process takes the same steps on the batches of all ranks, and nothing happens to it.
Each rank appends its notes to DIRECTORY/rank-N.jsonl. It is copied to a directory of its own and run there, never
imported.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx as px

_BATCH = 8
"""Of each rank."""


class Job:
    """What the two ways to save have in common: the model, the steps, the notes, the death."""

    def __init__(self, directory: Path) -> None:
        order: dict[str, Any] = json.loads((directory / "order.json").read_text())
        self.saves: str = order["saves"]
        self.ranks: int = order["ranks"]
        self.steps: int = order["steps"]
        self.every: int = order["every"]
        self._killed_after: int = order["killed_after"]
        self._width: int = order["width"]
        self.rank = int(os.environ.get("RANK", "0"))
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._notes = directory / f"rank-{self.rank}.jsonl"
        self.checkpoints = directory / "checkpoints"

    def note(self, event: str, **fields: Any) -> None:
        line = json.dumps({"time": time.time(), "event": event, "rank": self.rank, "attempt": self._attempt, **fields})
        with self._notes.open("a") as file:
            file.write(line + "\n")

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        width = self._width
        return nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """With momentum, so that its state has to come back too."""
        return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)

    def step(self, number: int, model: nn.Module, optimizer: torch.optim.Optimizer, mine: slice) -> None:
        """On samples of its own: who goes on from a wrong step has another loss."""
        torch.manual_seed(number)
        inputs = torch.randn(self.ranks * _BATCH, self._width)[mine]
        errors = (model(inputs) - inputs.mean(1, keepdim=True) * 10).square()
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
        self.note("step", step=number, loss=_of_rank_zero(errors))

    def my_samples(self) -> slice:
        return slice(self.rank * _BATCH, (self.rank + 1) * _BATCH)

    def die_if_it_is_time(self, step: int, wait: Callable[[], object]) -> None:
        """``wait`` until the last save is whole, or nobody could say from which step the next attempt has to go on."""
        if (self._attempt, self.rank, step) == (0, 1, self._killed_after):
            wait()
            self.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)


def _of_rank_zero(errors: Tensor) -> float:
    return errors[:_BATCH].mean().item()


def main(directory: Path) -> None:
    job = Job(directory)
    job.note("begun")
    if "RANK" not in os.environ:
        _alone(job)
    elif job.saves == "px.Checkpointer":
        _with_checkpointer(job)
    else:
        _with_torch_save(job)


def _alone(job: Job) -> None:
    model = job.model()
    optimizer = job.optimizer(model)
    for step in range(1, job.steps + 1):
        job.step(step, model, optimizer, slice(None))


def _with_checkpointer(job: Job) -> None:
    with px.init():
        job.note("joined")
        model = px.data_parallel(job.model())
        optimizer = job.optimizer(model)
        state = px.State(model=model, optimizer=optimizer)
        with px.Checkpointer(job.checkpoints, every=job.every) as checkpointer:
            job.note("built")
            checkpointer.load_latest(state)
            job.note("loaded", step=state.step)
            while state.step < job.steps:
                job.step(state.step + 1, model, optimizer, job.my_samples())
                state.step += 1
                checkpointer.save(state)
                job.die_if_it_is_time(state.step, checkpointer.wait)


def _with_torch_save(job: Job) -> None:
    dist.init_process_group("gloo")
    job.note("joined")
    _train_with_torch_save(job)
    gc.collect()  # a DDP model that is still there makes the end of the group wait for ever, with torch 2.13
    dist.destroy_process_group()


def _train_with_torch_save(job: Job) -> None:
    bare = job.model()
    model = DistributedDataParallel(bare)
    optimizer = job.optimizer(model)
    job.checkpoints.mkdir(exist_ok=True)
    path = job.checkpoints / "latest.pt"
    job.note("built")
    done = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    job.note("loaded", step=done)
    for step in range(done + 1, job.steps + 1):
        job.step(step, model, optimizer, job.my_samples())
        if step % job.every == 0 and job.rank == 0:
            _save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
        # Rank 1 cannot have taken a step after the save without rank 0, which has saved by then.
        job.die_if_it_is_time(step, lambda: None)


def _save(state: dict[str, Any], path: Path) -> None:
    """As a careful user would: whole or not at all."""
    aside = path.with_suffix(".tmp")
    with aside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
