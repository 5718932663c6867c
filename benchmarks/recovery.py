"""How long a run is away when a rank is killed: from the SIGKILL to the next step that is finished.

A small model is trained with DDP for 30 steps and saved every 10; after step 25 of the first attempt rank 1 kills
itself. phalanx, with px.Checkpointer, beside torchrun, with torch.save on rank 0, written aside, synced and renamed;
and phalanx with that script as it is. Every run has to resume at step 20, with the losses of an uninterrupted run of
one process on the same samples. With torch 2.13 a restart under torchrun may fail: it is then tried again, and the
failures are counted.

The phases, on rank 0: notice, until the agent knows of the death; stop, until no rank is left; begin, until the
script runs again and has torch; join, the process group; build, the model, the optimizer and what loading needs;
load, the state of the last saved step; step, the first one. torchrun does not report when it noticed and stopped, so
these are part of its begin. A restart that failed counts as far as it came.
"""

import functools
import gc
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import main, read_order
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import phalanx as px
from phalanx.bench import launch
from phalanx.bench.commands import Sample, Settings, Step, running
from phalanx.bench.common import MILLI, Benchmark, Flag, Row, among, by_contender, counts, positive, table
from phalanx.errors import UsageError

OURS, THEIRS = "px.Checkpointer", "torch.save"
WAYS = {
    # contender: its launcher, what the script saves with, and further flags of the launcher
    "phalanx": (launch.FORK, OURS, ()),
    "phalanx-preload": (launch.FORK, OURS, ("--preload", "phalanx.checkpoint.checkpointer")),
    "phalanx-torch-save": (launch.FORK, THEIRS, ()),
    "torchrun": (launch.TORCHRUN, THEIRS, ()),
}
STEPS, EVERY, KILLED_AFTER, BATCH = 30, 10, 25, 8
LAST_SAVED = KILLED_AFTER // EVERY * EVERY
ENDS = {"begin": "begun", "join": "joined", "build": "built", "load": "loaded", "step": "step"}
PHASES = ("notice", "stop", *ENDS)
SAME = 1e-3  # sums of several ranks depend on the order; other steps differ by far more
Note = Mapping[str, Any]
Losses = dict[int, float]  # of rank 0, by step


def plan(settings: Settings) -> Iterator[Step]:
    if settings.ranks[0] < 2:
        raise UsageError(f"--ranks has {settings.ranks[0]}; give 2 or more, for rank 1 is killed.")
    references = {ranks: take_reference(ranks, settings.width) for ranks in settings.ranks}
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            for name in settings.contenders:
                label = f"{name}, {ranks} ranks, repeat {repeat + 1} of {settings.repeats}"
                yield Step(label, functools.partial(_take, settings, name, ranks, repeat, references[ranks]))


def take_reference(ranks: int, width: int) -> Losses:
    """Of one process, on the samples of all ranks, to which nothing happens."""
    model, found = new_model(width), {}
    optimizer = new_optimizer(model)
    for step in range(1, STEPS + 1):
        found[step] = train_step(step, model, optimizer, ranks, width, slice(None))
    return found


def _take(settings: Settings, name: str, ranks: int, repeat: int, reference: Losses, directory: Path) -> list[Sample]:
    """Kills a rank of one contender; tried again when it is torchrun and the restart fails."""
    launcher, saves, flags = WAYS[name]
    samples: list[Sample] = []
    for number in range(settings.tries):
        place = directory / f"try-{number}"
        place.mkdir()
        (place / "order.json").write_text(json.dumps({"saves": saves, "ranks": ranks, "width": settings.width}))
        argv = [*launch.command(launcher, ranks), "--max-restarts", "1", *flags, __file__, "--rank", str(place)]
        timeout = min(settings.timeout, launch.RESTART_TIMEOUTS.get(launcher, settings.timeout))
        with running(["env", "OMP_NUM_THREADS=1", *argv], place, timeout) as command:
            failure = launch.finish_restart(launcher, command)
            notes = _read(place)
            if failure and not any(note["event"] == "killed" for note in notes):
                raise command.failure(f"{failure}, before there was anything to recover from")
            if not failure and (wrong := problem(notes, ranks, reference)):
                raise command.failure(wrong)
        found = phases(notes, _read(place / "runs/latest", "agent.events.jsonl"))
        samples += [Sample(phase, name, ranks, repeat, (taken,)) for phase, taken in found.items()]
        samples.append(Sample("recovery", name, ranks, repeat, () if failure else (sum(found.values()),), note=failure))
        if not failure:
            break
    return samples


def _read(directory: Path, names: str = "rank-*.jsonl") -> list[Note]:
    return [json.loads(line) for path in directory.glob(names) for line in path.read_text().splitlines()]


def _of_rank_zero(notes: Sequence[Note], event: str, attempt: int) -> list[Note]:
    return [note for note in notes if (note["event"], note["attempt"], note["rank"]) == (event, attempt, 0)]


def losses(notes: Sequence[Note], attempt: int) -> Losses:
    return {note["step"]: note["loss"] for note in _of_rank_zero(notes, "step", attempt)}


def problem(notes: Sequence[Note], ranks: int, reference: Losses) -> str:
    """What is wrong with how the run resumed; empty when nothing is."""
    killed = [note for note in notes if note["event"] == "killed"]
    if len(killed) != 1:
        return f"had {len(killed)} ranks killed instead of 1"
    resumed = [note["step"] for note in notes if note["event"] == "loaded" and note["attempt"] == 1]
    if resumed != [LAST_SAVED] * ranks:
        return f"resumed at the steps {resumed}, and {ranks} ranks should have at {LAST_SAVED}"
    # Rank 0 may not have come to the end of the step after which rank 1 killed itself.
    for attempt, steps in enumerate((range(1, KILLED_AFTER), range(LAST_SAVED + 1, STEPS + 1))):
        found = losses(notes, attempt)
        if missing := [step for step in steps if step not in found]:
            return f"has not taken the steps {missing} in attempt {attempt}"
        for step in steps:
            if not math.isclose(found[step], reference[step], rel_tol=SAME):
                return f"has the loss {found[step]:g} at step {step} of attempt {attempt}, not {reference[step]:g}"
    return ""


def phases(notes: Sequence[Note], agent: Sequence[Note]) -> dict[str, float]:
    """Seconds of each of PHASES on rank 0. Only phalanx reports the first two; of others they are in ``begin``.
    A restart that failed has those that it came to the end of."""

    def first(found: Sequence[Note], event: str) -> float | None:
        return min((note["time"] for note in found if note["event"] == event), default=None)

    ends = {"notice": first(agent, "exited"), "stop": first(agent, "restarting")}
    ends |= {phase: first(_of_rank_zero(notes, event, 1), event) for phase, event in ENDS.items()}
    before, found = first(notes, "killed") or 0.0, {}
    for phase, end in ends.items():
        if end is not None:
            found[phase], before = end - before, end
    return found


def tables(rows: Sequence[Row], settings: Settings) -> list[str]:
    title = "Recovery, seconds: from the SIGKILL of one rank to the first step that is finished after it"
    found = {(row.ranks, row.measure): row for row in rows}
    body = []
    for ranks, name in itertools.product(settings.ranks, settings.contenders):
        times = [row.times(name) if (row := found.get((ranks, phase))) else None for phase in PHASES]
        body.append([str(ranks), name, *(f"{each.median / MILLI:.0f}" if each else "" for each in times)])
    return [
        by_contender(title, rows, "recovery", launch.TORCHRUN),
        table("Where the time goes: medians in ms, on rank 0", ["ranks", "", *PHASES], body),
    ]


def new_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    hidden, second, last = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
    return nn.Sequential(hidden, nn.Tanh(), second, nn.Tanh(), last)


def new_optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)  # its state has to come back too


def train_step(number: int, model: nn.Module, optimizer: Optimizer, ranks: int, width: int, mine: slice) -> float:
    """The loss of the first samples. Each step has its own: a rank that resumes at a wrong step has another loss."""
    torch.manual_seed(number)
    inputs = torch.randn(ranks * BATCH, width)[mine]
    errors = (model(inputs) - inputs.mean(1, keepdim=True) * 10).square()
    optimizer.zero_grad()
    errors.mean().backward()
    optimizer.step()
    return errors[:BATCH].mean().item()


class Job:
    """What both ways to save have in common: the steps, the notes, the death."""

    def __init__(self, directory: Path) -> None:
        self._directory, order = directory, read_order(directory)
        self.saves, self.width, self._ranks = order["saves"], order["width"], order["ranks"]
        self.rank, self._attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.checkpoints = directory / "checkpoints"

    def note(self, event: str, **fields: Any) -> None:
        line = json.dumps({"time": time.time(), "event": event, "rank": self.rank, "attempt": self._attempt, **fields})
        with (self._directory / f"rank-{self.rank}.jsonl").open("a") as file:
            file.write(line + "\n")

    def step(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        mine = slice(self.rank * BATCH, (self.rank + 1) * BATCH)
        self.note("step", step=number, loss=train_step(number, model, optimizer, self._ranks, self.width, mine))

    def die_if_it_is_time(self, step: int, wait: Callable[[], object]) -> None:
        """``wait`` until the last save is whole, or nobody could say at which step the next attempt has to resume."""
        if (self._attempt, self.rank, step) == (0, 1, KILLED_AFTER):
            wait()
            self.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)


def rank(directory: Path) -> None:
    job = Job(directory)
    job.note("begun")
    if job.saves == OURS:
        _train_with_checkpointer(job)
        return
    dist.init_process_group("gloo")
    job.note("joined")
    _train_with_torch_save(job)
    gc.collect()  # with torch 2.13 a DDP model that is still there makes the end of the group wait for ever
    dist.destroy_process_group()


def _train_with_checkpointer(job: Job) -> None:
    with px.init():
        job.note("joined")
        model = px.data_parallel(new_model(job.width))
        optimizer = new_optimizer(model)
        state = px.State(model=model, optimizer=optimizer)
        with px.Checkpointer(job.checkpoints, every=EVERY) as checkpointer:
            job.note("built")
            checkpointer.load_latest(state)
            job.note("loaded", step=state.step)
            while state.step < STEPS:
                job.step(state.step + 1, model, optimizer)
                state.step += 1
                checkpointer.save(state)
                job.die_if_it_is_time(state.step, checkpointer.wait)


def _train_with_torch_save(job: Job) -> None:
    bare = new_model(job.width)
    model = DistributedDataParallel(bare)
    optimizer = new_optimizer(model)
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
    for step in range(done + 1, STEPS + 1):
        job.step(step, model, optimizer)
        if step % EVERY == 0 and job.rank == 0:  # as a careful user would: whole or not at all
            aside = path.with_suffix(".tmp")
            with aside.open("wb") as file:
                torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        # Rank 1 cannot have taken a step after the save without rank 0, which has saved by then.
        job.die_if_it_is_time(step, lambda: None)


FLAGS = (
    Flag("--ranks", "A,B", counts, "2,4", "each at least 2"),
    Flag("--contenders", "A,B", among(WAYS), ",".join(WAYS)),
    Flag("--tries", "N", positive, 3, "of a restart that fails"),
    Flag("--width", "N", positive, 512, "of the model"),
)
BENCHMARK = Benchmark("recovery", __doc__, plan, tables, FLAGS, repeats=5)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, rank))
