"""A rank that is slow is named with the phase and with what its machine says, while it is slow, on shm and on gloo.

The work is sleep, so that the number of cores does not matter: 40 ms a step, and 14 ms more on the slow rank. A run
goes on until its agent has said what it has to, so it takes as long as it must and no longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.testing import virtual_nodes
from tests.conftest import Runner, start

SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

PHALANX = [sys.executable, "-m", "phalanx"]
directory = Path(os.environ["PHALANX_RUN_DIR"])
late = {"data": 0.0, "forward": 0.0}
spins = False

def work(seconds):
    if not spins:
        return time.sleep(seconds)
    until = time.thread_time() + seconds / 8
    while time.thread_time() < until:
        pass

class Data(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        work(0.01 + late["data"])
        return torch.ones(10)

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        work(0.01)
        return gradient

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(10, 10), torch.nn.BatchNorm1d(10)  # its buffers are sent before forward
    def forward(self, x):
        work(0.02 + late["forward"])
        return Backward.apply(self.norm(self.layer(x)))

def told():
    lines = (directory / "agent.events.jsonl").read_text().splitlines()
    return sum(json.loads(line)["event"] == "straggler" for line in lines)

def train(count=0, steps=None, until=lambda: True):
    # So many steps, or until the agent has told so many things.
    for step in range(1, 3001):
        loss = model(next(batches)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())  # where everybody waits for the slow one, outside of DDP
        if step % 10 == 0:
            is_enough = step >= steps if steps else rank == 0 and told() >= count and until()
            enough = torch.tensor(float(is_enough))
            dist.broadcast(enough, 0)
            if enough:
                return
    raise AssertionError(f"{told()} of {count} have been told")

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = DataLoader(Data(), batch_size=2, collate_fn=lambda pair: torch.stack(pair))
if "track" in sys.argv:
    import phalanx as px
    batches = px.track(batches, quiet=True)
batches = iter(batches)
late["data"] = -0.005  # a batch is two items
"""

DELAYS = """
train(steps=60)
assert told() == 0, "they are all alike"
late["data"] += 0.007 * (rank == 1)
train(1)
if rank == 0:
    inspect = subprocess.Popen([*PHALANX, "inspect", "--json", str(directory)], stdout=subprocess.PIPE)
train(1, until=lambda: inspect.poll() is not None)
if rank == 0:
    (directory / "moving.json").write_bytes(inspect.communicate()[0])
late["data"] = -0.005
train(2)
late["forward"] = 0.014 * (rank == 2)
train(3)
late["forward"] = 0.0
if rank == 1:
    command = [*PHALANX, "inspect", "--seconds", "1", "--stacks"]
    seen = subprocess.run(command, stdout=subprocess.PIPE, cwd=directory.parents[1])
    (directory / "hanging.txt").write_bytes(seen.stdout)
train(steps=10)
if "track" in sys.argv:
    batches.close()
"""

ONE_OF_FOUR = """
train(steps=20)
late["data"] += 0.007 * (rank == 3)
train(1)
"""

LIMITED = """
spins = True
train(steps=20)
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid())) if rank == 1 else None
try:
    train(1)
finally:
    Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
"""


def begin(kind: str, script: Callable[..., str], tmp_path: Path, text: str, *arguments: str) -> subprocess.Popen:
    name = script(SCRIPT + text, f"{kind}/train.py")
    flags = ("--nproc-per-node", "3", "--backend", kind)
    return start("-m", "phalanx", "run", *flags, Path(name).name, *arguments, cwd=tmp_path / kind)


def finish(process: subprocess.Popen) -> list[str]:
    """What was said of stragglers."""
    try:
        out, err = process.communicate(timeout=90)
    except BaseException:
        process.kill()
        raise
    assert process.returncode == 0, out + err
    return [line for line in err.splitlines() if re.match(r"phalanx: rank \d (is|keeps)", line)]


def test_delays_in_data_and_in_compute(script: Any, phalanx: Runner, tmp_path: Path) -> None:
    kinds = {"shm": ["track"], "gloo": []}
    names = {"shm": "auto", "gloo": "as-written"}
    with contextlib.ExitStack() as stack:
        running = {
            kind: stack.enter_context(begin(names[kind], script, tmp_path, DELAYS, *given))
            for kind, given in kinds.items()
        }
        said = {kind: finish(process) for kind, process in running.items()}
    for kind, lines in said.items():
        in_data, over, in_forward = lines
        assert re.fullmatch(
            r"phalanx: rank 1 is \d\d % slower than the median \(own work \d\d ms a step against \d\d ms\) "
            r"for \d+ steps, in data\b.*; on host \S+: CPU share \d+ %.*",
            in_data,
        ), (kind, in_data)
        assert over.startswith("phalanx: rank 1 keeps up again: own work "), (kind, over)
        assert re.match(r"phalanx: rank 2 is \d\d % slower .* in forward\b.*; on host ", in_forward), (kind, in_forward)

        runs = tmp_path / names[kind] / "runs"
        (directory,) = (path for path in runs.iterdir() if path.is_dir() and not path.is_symlink())
        kept = json.loads((directory / "report.json").read_text())["stragglers"]
        assert [(one["rank"], one["phases"][0], one["is_over"]) for one in (kept[0], kept[2])] == [
            (1, "data", False),
            (2, "forward", False),
        ]
        assert all(0.2 < one["slower"] < 0.6 for one in (kept[0], kept[2])), kept
        assert kept[0]["conditions"]["cpu"] < 0.9, "it sleeps"

        moving = json.loads((directory / "moving.json").read_text())
        assert re.match(r"slowest: rank 1, by \d\d % .* in data\b", moving["conclusion"]), moving["conclusion"]
        assert [one["rank"] for one in moving["ranks"]] == [0, 1, 2]
        first, slow, last = moving["ranks"]
        assert slow["data"] > first["data"] + 0.05
        assert first["wait"] > slow["wait"] + 0.05
        assert last["wait"] > slow["wait"] + 0.05
        assert all(3 < one["pace"] < 25 and one["has_moved"] and one["resident"] > 1 << 20 for one in moving["ranks"])
        assert all((one["step"] > 0) == (kind == "shm") for one in moving["ranks"]), "px.track counts in one of them"

        hanging = (directory / "hanging.txt").read_text().splitlines()
        assert hanging[-1].startswith("no rank has made progress within 1 s: ranks 0, 2 wait in "), hanging
        assert "for rank 1 (in " in hanging[-1]
        assert any(re.match(r"ranks? 0.* waits? since .*, train.py:\d+$", line) for line in hanging), hanging
        stack = hanging[hanging.index("rank 1, innermost first:") + 1 : -1]
        assert any(re.search(r"train.py:\d+ in <module>: seen = subprocess.run", line) for line in stack), stack
        ended = phalanx("inspect", str(directory))
        assert ended.code == 0
        assert "ended with exit code 0" in ended.lines[0]
        assert [line.split()[:2] for line in ended.lines[2:5]] == [["0", "exit"], ["1", "exit"], ["2", "exit"]]


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root")
def test_a_rank_of_another_node(tmp_path: Path) -> None:
    """One node compares the ranks of both, and both say and keep the same."""
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--backend", "as-written"]
    with virtual_nodes(2) as nodes:
        agents = []
        for rank, node in enumerate(nodes):
            place = tmp_path / f"at-{rank}"
            place.mkdir()
            (place / "train.py").write_text(SCRIPT + ONE_OF_FOUR)
            meeting = ["--node-rank", str(rank), "--master-addr", nodes[0].address, "--master-port", "29500"]
            command = [sys.executable, "-m", "phalanx", "run", *flags, *meeting, "train.py"]
            agents.append(node.start(command, cwd=place, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL))
        said = [finish(agent) for agent in agents]
    assert said[0] == said[1]
    (line,) = said[0]
    assert re.match(r"phalanx: rank 3 is \d\d % slower .* in data\b.*; on host node1: CPU share \d+ %", line), line
    for node in range(2):
        report = json.loads((tmp_path / f"at-{node}/runs/latest/report.json").read_text())
        (kept,) = report["stragglers"]
        assert (kept["rank"], kept["host"], kept["phases"][0]) == (3, "node1", "data")


@pytest.fixture
def limited() -> Iterator[tuple[Path, Path]]:
    """A control group with a tenth of a core, and the one that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_second = not controllers  # version of control groups
        if not is_second and "cpu" not in controllers.split(","):
            continue
        home = Path("/sys/fs/cgroup", "" if is_second else controllers, path.lstrip("/"))
        group = home / f"phalanx-test-{os.getpid()}"
        limits = {"cpu.max": "2000 20000"} if is_second else {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "2000"}
        if not (home / "cgroup.procs").exists() or not os.access(home, os.W_OK):
            continue
        group.mkdir()
        try:
            if all((group / name).exists() for name in limits):
                for name, value in limits.items():
                    (group / name).write_text(value)
                yield group, home
                return
        finally:
            _remove(group)
    pytest.skip("no control group with a limit on cores can be made here")


def _remove(group: Path) -> None:
    """When it is empty: of a run that was killed the ranks may need a moment to end."""
    deadline = time.monotonic() + 10.0
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()


def test_a_rank_whose_cores_are_limited(limited: tuple[Path, Path], script: Any, tmp_path: Path) -> None:
    with begin("auto", script, tmp_path, LIMITED, *map(str, limited)) as process:
        (line,) = finish(process)
    assert line.startswith("phalanx: rank 1 is "), line
    found = re.search(r"CPU share (\d+) %, throttled by its cgroup (\d+) % of the time", line)
    assert found, line
    assert int(found[1]) < 30, "what it is allowed is a tenth"
    assert int(found[2]) > 40
