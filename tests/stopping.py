"""A run of four ranks that is stopped in the middle of its training, and what it has to leave."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

import phalanx as px
from tests.slurm_cluster import await_that

SCRIPT = """
import os, random, sys, time, torch, phalanx as px
with px.init() as world:
    model = px.data_parallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = px.State(model=model, optimizer=optimizer)
    with px.Checkpointer("checkpoints", every=1_000_000) as checkpointer:
        checkpointer.load_latest(state)
        for batch in px.track([torch.randn(2, 4)] * 100_000, quiet=True):
            model(batch).sum().backward()
            optimizer.step()
            state.step += 1
            checkpointer.save(state)
            if state.step == 70:  # after the first windows of steps that the ranks tell of
                open(f"ready-{world.rank}", "w").write(str(os.getpid()))
            time.sleep(random.random() * 0.01)
    with open(f"saved-{world.rank}", "a") as file:
        file.write(f"{state.step} {px.stop.reason}\\n")
    time.sleep(float(sys.argv[1]) * (world.rank == 3))  # the slowest to end
"""
RANKS = range(4)


def prepare(place: Path) -> Path:
    place.mkdir(exist_ok=True)
    (place / "stops.py").write_text(SCRIPT)
    return place


def await_training(place: Path, seconds: float = 110) -> list[int]:
    """Returns the pids of the ranks, in their own nodes, once they have trained for a while."""
    paths = [place / f"ready-{rank}" for rank in RANKS]
    await_that(lambda: all(path.exists() and path.read_text() for path in paths), "the ranks train", seconds)
    return [int(path.read_text()) for path in paths]


def check(place: Path, err: str, by: str = "SIGTERM") -> int:
    """All ranks have stopped once, at the same step, with a whole checkpoint. Returns the exit code in the reports."""
    texts = [(place / f"saved-{rank}").read_text() for rank in RANKS]
    assert len(set(texts)) == 1, err
    assert re.fullmatch(rf"\d+ {by}\n", texts[0]), err
    step = int(texts[0].split()[0])
    loaded = px.Checkpointer(place / "checkpoints").load_latest(px.State(model=torch.nn.Linear(4, 1)))
    assert loaded is not None
    assert loaded.step == step
    reports = [json.loads(path.read_text()) for path in (place / "runs").glob("2*/report.json")]
    assert len(reports) > 1, "one for each node"
    for report in reports:
        stop = report["stop"]
        assert (stop["by"], stop["step"], stop["killed"], stop["failed"]) == (by, step, [], []), err
        assert step in stop["saved"].values()
    told = f"stopped by {by} after {step} steps; all ranks have ended by themselves; the last checkpoint is of step "
    assert err.count(f"phalanx: {told}{step}") == 1, err
    assert err.count("stopping the ranks") == (by not in ("SIGUSR1", "SIGUSR2")), err
    (code,) = {report["exit_code"] for report in reports}
    return code
