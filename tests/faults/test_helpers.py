"""The zygote and the keeper are killed, stopped or silent: the run resumes, or at least ends."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from phalanx import events
from phalanx.fd_channel import Channel
from phalanx.launch.agent import attempt_run
from phalanx.launch.agent.failure_judge import FailureJudge
from phalanx.launch.agent.rank_process import RankProcess
from phalanx.launch.process.helper_processes import HelperLost
from phalanx.launch.process.zygote_client import ZygoteClient
from phalanx.launch.spec.launch_spec import LaunchSpec, Program, placements
from phalanx.system import ports, procfs
from tests.conftest import WITHOUT_TORCH, Runner, start, told

SLEEPS = """
import os, sys, time
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("up", attempt, flush=True)
if attempt < FINAL:
    time.sleep(1000)
"""
FREEZER = Path("/sys/fs/cgroup/freezer")


def helpers(agent: subprocess.Popen) -> tuple[psutil.Process, psutil.Process]:
    """The zygote and the keeper: of the zygote's children the one that leads no session of its own."""
    (zygote,) = psutil.Process(agent.pid).children()
    (keeper,) = [child for child in zygote.children() if os.getsid(child.pid) != child.pid]
    return zygote, keeper


def await_up(agent: subprocess.Popen, attempt: int, ranks: int = 2) -> None:
    assert agent.stdout is not None
    for _ in range(ranks):
        assert agent.stdout.readline().endswith(f"up {attempt}\n")


def run(tmp_path: Path, script: str, *flags: str) -> subprocess.Popen:
    return start("-m", "phalanx", "run", "--nproc-per-node", "2", *WITHOUT_TORCH, *flags, script, cwd=tmp_path)


def test_killed_helpers_are_replaced(script, tmp_path: Path) -> None:
    agent = run(tmp_path, script(SLEEPS.replace("FINAL", "3")), "--max-restarts", "3")
    await_up(agent, 0)
    zygote, keeper = helpers(agent)
    zygote.kill()
    await_up(agent, 1)
    (new_zygote,) = psutil.Process(agent.pid).children()
    assert new_zygote.pid != zygote.pid
    assert keeper.is_running(), "the store's process outlives the zygote"
    keeper.kill()
    await_up(agent, 2)
    zygote, keeper = helpers(agent)
    assert zygote.pid == new_zygote.pid, "only the keeper is replaced"
    keeper.kill()
    zygote.kill()
    await_up(agent, 3)
    _, err = agent.communicate(timeout=40)
    assert agent.returncode == 0, err
    lines = [line for line in told(err) if "starting again" in line]
    assert len(lines) == 3
    killed = f"the process that starts the workers (pid {new_zygote.pid}) was killed by SIGKILL"
    assert lines[0].endswith("was killed by SIGKILL; all workers are ended; starting again, attempt 2 of 4")
    assert "the process that hosts the store (pid" in lines[1]
    assert killed in lines[2] or "hosts the store" in lines[2]
    report = json.loads((tmp_path / "runs/latest/report.json").read_text())
    assert (report["exit_code"], report["attempts"], len(report["restarts"])) == (0, 4, 3)


@pytest.mark.parametrize("who", ["zygote", "keeper"])
def test_a_stopped_helper_keeps_nobody_from_ending(who: str, script, tmp_path: Path) -> None:
    agent = run(tmp_path, script(SLEEPS.replace("FINAL", "1")), "--shutdown-timeout", "2")
    await_up(agent, 0)
    zygote, keeper = helpers(agent)
    (zygote if who == "zygote" else keeper).suspend()
    agent.terminate()
    started = time.monotonic()
    _, err = agent.communicate(timeout=40)
    assert time.monotonic() - started < 10.0
    assert agent.returncode == 128 + signal.SIGTERM, err


def test_a_run_ends_although_the_zygote_is_stopped(script, tmp_path: Path) -> None:
    agent = run(tmp_path, script("import time; print('up 0', flush=True); time.sleep(1)"))
    await_up(agent, 0)
    zygote, _ = helpers(agent)
    zygote.suspend()
    _, err = agent.communicate(timeout=30)
    assert agent.returncode == 0, err
    assert f"the process that starts the workers (pid {zygote.pid}) was stopped; it is resumed" in err


@pytest.fixture
def frozen() -> Iterator[Path]:
    """A control group whose processes do not even hear SIGKILL, as those that wait for a dead file system."""
    if not (FREEZER / "tasks").exists() or not os.access(FREEZER, os.W_OK):
        pytest.skip("needs root and the freezer of cgroups, version 1")
    group = FREEZER / f"phalanx-{os.getpid()}"
    group.mkdir()
    yield group
    deadline = time.monotonic() + 5.0
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    group.rmdir()


@pytest.mark.parametrize("who", ["rank", *["zygote"] * (os.environ.get("CONTACT") == "full")])
def test_a_process_that_cannot_be_killed_is_named_and_left(who: str, frozen: Path, script, tmp_path: Path) -> None:
    agent = run(tmp_path, script(SLEEPS.replace("FINAL", "9")), "--shutdown-timeout", "0", "--max-restarts", "3")
    await_up(agent, 0)
    zygote, _ = helpers(agent)
    ranks = [child for child in zygote.children() if os.getsid(child.pid) == child.pid]
    stuck = ranks[0] if who == "rank" else zygote
    (frozen / "cgroup.procs").write_text(str(stuck.pid))
    (frozen / "freezer.state").write_text("FROZEN")
    agent.terminate()
    started = time.monotonic()
    try:
        code = agent.wait(timeout=40)
    finally:
        (frozen / "freezer.state").write_text("THAWED")  # the zygote has the standard error of the agent, too
    assert time.monotonic() - started < 30.0
    _, err = agent.communicate(timeout=10)
    assert code == 128 + signal.SIGTERM, err
    name = "rank [01]" if who == "rank" else "a process of this run"
    (line,) = [line for line in told(err) if "cannot be ended" in line]
    where = rf"pid {stuck.pid}, state D \(waits for a device or a file system\), wchan \w+"
    assert re.fullmatch(rf"phalanx: {name} cannot be ended, not even by SIGKILL: {where}; it is left behind", line)


UNKILLABLE = """
import os, signal
kill = os.kill
# As a process that waits in a driver: the signal is sent, and nothing happens.
os.kill = lambda pid, number: None if number == 9 and os.path.exists(f"HERE/stuck-{pid}") else kill(pid, number)
"""
HANGS = """
import ctypes, os, signal, time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # the kernel would kill it with the zygote
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"stuck-{os.getpid()}", "w").close()
    dist.barrier()
    time.sleep(60)
dist.barrier()
dist.barrier()
"""


if os.environ.get("CONTACT") == "full":  # it takes 15 seconds, and the next test is the short one

    def test_the_verdict_on_a_hang_is_told_although_a_rank_cannot_be_killed(
        phalanx: Runner, script, tmp_path: Path
    ) -> None:
        script(UNKILLABLE.replace("HERE", str(tmp_path)), name="sitecustomize.py")
        flags = ("--nproc-per-node", "2", "--shutdown-timeout", "0", "--stall-after", "4", "--on-stall", "kill")
        try:
            outcome = phalanx("run", *flags, "--max-restarts", "2", script(HANGS), env={"PYTHONPATH": str(tmp_path)})
        finally:
            (stuck,) = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("stuck-*")]
            os.kill(stuck, signal.SIGKILL)
        assert outcome.code == 1
        assert f"rank 0 cannot be ended, not even by SIGKILL: pid {stuck}, state S" in outcome.err
        assert "a hang: rank 0 sleeps at train.py:10 while rank 1 waits" in outcome.told[-1], outcome.err
        assert "starting again" not in outcome.err


def test_a_zygote_whose_worker_does_not_die(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(attempt_run, "_LEAST_TO_DIE", 0.1)
    sent: list[int] = []
    end, other = socket.socketpair()
    zygote: Any = SimpleNamespace(
        fileno=end.fileno, pid=7, ready=True, start=lambda *_: None, signal=lambda _, number: sent.append(number)
    )
    with selectors.DefaultSelector() as selector, end, other:
        attempt = attempt_run.AttemptRun(zygote, selector, 0.0, print)
        rank = RankProcess(placements([1])[0])
        attempt.ranks[0], rank.pid = rank, 42
        attempt.stop(signal.SIGTERM)
        started = time.monotonic()
        with pytest.raises(HelperLost, match=r"has not ended them 0.1 s after it was asked to send SIGKILL") as lost:
            [attempt.turn(1.0) for _ in range(10)]
        rank.close()
    assert (sent, time.monotonic() - started < 5.0) == ([signal.SIGKILL], True)
    # The verdict is still the reason why it was to be ended.
    watchdogs: Any = SimpleNamespace(hang=SimpleNamespace(headline="rank 0 is missing in barrier #2"))
    judge = FailureJudge(
        tmp_path, LaunchSpec(Program("script", "train.py")), cast(Any, None), watchdogs, cast(Any, None)
    )
    stuck = events.Ending(rank=0, pid=42, time=1.0, exit_code=None, signal=9, asked=True)
    assert judge.judge([stuck], [str(lost.value)]) == (None, "rank 0 is missing in barrier #2")


def test_where_a_process_hangs(tmp_path: Path) -> None:
    home = tmp_path / "7"
    home.mkdir()
    (home / "stat").write_text("7 (a) b) D 1 7" + " 0" * 47)
    (home / "wchan").write_text("nfs_wait_bit_killable")
    told = "pid 7, state D (waits for a device or a file system), wchan nfs_wait_bit_killable"
    assert procfs.describe(7, tmp_path) == told
    assert procfs.describe(8, tmp_path) == "pid 8, which has ended meanwhile"


def test_a_keeper_that_ends_just_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    sleeping = procfs.stat(os.getpid())
    monkeypatch.setattr(procfs, "stat", lambda pid: sleeping)  # as it was a moment ago
    ours, theirs = Channel.pair()
    theirs.close()
    zygote = ZygoteClient.__new__(ZygoteClient)
    zygote._keeper, zygote._keeper_pid, zygote._stores, zygote._answers_due = ours, gone.pid, 1, 0
    with pytest.raises(HelperLost, match=rf"hosts the store \(pid {gone.pid}\) has ended"):
        zygote.fresh_store()


def test_a_zygote_that_ends_before_it_has_started_the_keeper() -> None:
    with ports.listen(ports.LOOPBACK, 0) as listener:
        zygote = ZygoteClient(os.environ, start_method="exec", listener=listener)
    try:
        zygote._process.kill()
        zygote._process.wait()
        with pytest.raises(HelperLost, match=f"the process that starts the workers .pid {zygote.pid}. was killed by"):
            zygote.fresh_store()
    finally:
        zygote.close()
