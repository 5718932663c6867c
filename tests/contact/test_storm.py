"""Kills of many kinds, one after the other: the run resumes from its checkpoints, and ends as an undisturbed one."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import runpy
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from phalanx.diagnose.run_directory import read_events
from tests.conftest import marked_processes, start

SCRIPT = """
import os, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px

HERE = Path.cwd()
TOTAL = int(os.environ["STORM_STEPS"])

def keep_pid(worker):
    (HERE / f"loader-{os.environ['RANK']}").write_text(str(os.getpid()))

with px.init(seed=0) as world:
    (HERE / f"rank-{world.rank}").write_text(str(os.getpid()))
    inputs = torch.randn(256, 8)
    sampler = px.ShardSampler(dataset := TensorDataset(inputs, inputs.sum(1, keepdim=True)))
    workers = dict(num_workers=1, worker_init_fn=keep_pid, persistent_workers=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, **workers)
    model = px.data_parallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    state = px.State(model=model, optimizer=optimizer, sampler=sampler)
    with px.Checkpointer("checkpoints", every=1, keep=3) as checkpointer:
        checkpointer.load_latest(state)
        while state.step < TOTAL:
            for x, y in px.track(loader, epoch=sampler.epoch, quiet=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                state.step += 1
                checkpointer.save(state)
                if world.is_main:
                    (HERE / "step.new").write_text(str(state.step))
                    (HERE / "step.new").replace(HERE / "step")
                if world.rank == 1 and (HERE / "exit").exists():
                    (HERE / "exit").unlink()
                    os._exit(7)
                if not (HERE / "calm").exists():
                    time.sleep(0.02)
                if state.step >= TOTAL:
                    break
            else:
                sampler.set_epoch(sampler.epoch + 1)
    digest = [value.double().sum().item().hex() for value in model.state_dict().values()]
    px.print("result", state.step, *digest)
"""


class Storm:
    """One run, and those of its processes that can be hit."""

    def __init__(self, directory: Path, steps: int) -> None:
        directory.mkdir()
        (directory / "train.py").write_text(SCRIPT)
        self.directory = directory
        command = ("-m", "phalanx", "run", "--nproc-per-node", "2", "--max-restarts", "1000", "train.py")
        self.agent = start(*command, cwd=directory, env={"STORM_STEPS": str(steps)})

    @property
    def step(self) -> int:
        path = self.directory / "step"
        return int(path.read_text()) if path.exists() else 0

    @property
    def restarts(self) -> int:
        path = self.directory / "runs/latest/agent.events.jsonl"
        return sum(event["event"] == "restarting" for event in read_events(path)) if path.exists() else 0

    def await_until(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90.0
        while not is_there():
            assert self.agent.poll() is None, f"the run has ended before {what}: {self.agent.communicate()[1]}"
            assert time.monotonic() < deadline, f"no {what} since step {self.step}"
            time.sleep(0.01)

    def pid(self, name: str) -> int:
        """Of a rank, a loader's worker, the zygote or the keeper, which leads no session and belongs to no rank."""
        if name not in ("zygote", "keeper"):
            return int((self.directory / name).read_text())
        (zygote,) = psutil.Process(self.agent.pid).children()
        if name == "zygote":
            return zygote.pid
        ranks = {self.pid("rank-0"), self.pid("rank-1")}
        for pid in marked_processes():
            with contextlib.suppress(OSError, psutil.Error):
                session = os.getsid(pid)
                is_forked = "phalanx.launch.process.zygote" in " ".join(psutil.Process(pid).cmdline())
                if is_forked and session != pid and session not in ranks and self._is_ours(pid):
                    return pid
        raise AssertionError("there is no keeper")

    def _is_ours(self, pid: int) -> bool:
        return psutil.Process(pid).cwd() == str(self.directory)

    def hit(self, name: str, number: int) -> None:
        if name == "script":
            (self.directory / "exit").touch()
            return
        for _ in range(200):  # one that is just being replaced
            with contextlib.suppress(OSError, psutil.Error, ValueError, AssertionError):
                os.kill(self.pid(name), number)
                if number == signal.SIGSTOP and name.startswith("rank"):  # the agent continues its own helpers
                    time.sleep(0.5)
                    os.kill(self.pid(name), signal.SIGCONT)
                return
            time.sleep(0.02)
        raise AssertionError(f"{name} cannot be found")

    def end(self) -> tuple[int, list[str], str]:
        (self.directory / "calm").touch()
        out, err = self.agent.communicate(timeout=300)
        return self.agent.returncode, [line for line in out.splitlines() if "result" in line], err


def undisturbed(run_ranks: Callable[..., list[str]], directory: Path, steps: int) -> list[str]:
    """The result of the same script on ranks that nobody hits, and that have torch already."""
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    (directory / "calm").touch()

    def train(rank: int) -> str:
        os.chdir(directory)
        os.environ["STORM_STEPS"] = str(steps)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path("train.py", run_name="__main__")
        return printed.getvalue()

    first, _ = run_ranks(train, 2, join_group=False, timeout=300)
    return [f"[rank 0] {line}" for line in first.splitlines() if "result" in line]


FEW = [
    *[("rank-0", signal.SIGKILL), ("zygote", signal.SIGKILL), ("rank-1", signal.SIGSEGV)],
    *[("keeper", signal.SIGKILL), ("loader-0", signal.SIGKILL), ("script", 0)],
]
ALL = [
    *FEW,
    *[("rank-1", signal.SIGTERM), ("rank-0", signal.SIGABRT), ("rank-0", signal.SIGSTOP), ("zygote", signal.SIGSTOP)],
    *[("keeper", signal.SIGSTOP), ("loader-1", signal.SIGSEGV), ("rank-1", signal.SIGINT), ("zygote", signal.SIGABRT)],
]


def kinds() -> list[tuple[str, int]]:
    """All in turn, and some many times in a row: each attempt gets a little further, so that is no crash loop."""
    if os.environ.get("CONTACT") != "full":
        return FEW
    repeated = [kind for kind in (FEW[0], FEW[4], FEW[5], FEW[3]) for _ in range(8)]
    return [*ALL, *repeated, *itertools.islice(itertools.cycle(ALL), 60 - len(ALL) - len(repeated))]


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Callable[..., Storm]]:
    running: list[Storm] = []

    def begin(name: str, steps: int) -> Storm:
        running.append(Storm(tmp_path / name, steps))
        return running[-1]

    yield begin
    for one in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if one.agent.poll() is None:
                one.agent.terminate()
            one.agent.communicate(timeout=30)


@pytest.mark.long
def test_a_storm_of_kills(storm: Callable[..., Storm], run_ranks, tmp_path: Path, record_property) -> None:
    """Signals to ranks, loader workers, the zygote and the keeper of one run with checkpoints."""
    hits = kinds()
    steps = 10 * len(hits) + 20
    disturbed = storm("disturbed", steps)
    kills = 0
    for name, number in hits:
        target = disturbed.step + 2
        disturbed.await_until(f"step {target}", lambda: disturbed.step >= target)  # noqa: B023 (called before it changes)
        disturbed.hit(name, number)
        kills += number != signal.SIGSTOP
        disturbed.await_until(f"restart after {name}", lambda: disturbed.restarts >= kills)  # noqa: B023
    assert disturbed.step < steps, "the run was over before the last kill"
    code, result, err = disturbed.end()
    assert code == 0, err
    assert sum("starting again" in line for line in err.splitlines()) == kills, err
    # A killed loader's parent prints what Python's own threads say of it; of the launcher there is nothing.
    assert not [line for line in err.splitlines() if "Traceback" in line and not line.startswith("[rank ")], err
    assert result
    assert result == undisturbed(run_ranks, tmp_path / "undisturbed", steps)
    record_property("result", f"{kills} kills, {len(hits) - kills} stops, {steps} steps; weights as without them")
