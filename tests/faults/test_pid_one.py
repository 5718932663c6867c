"""`phalanx run` as pid 1 of a container: it reaps orphans, passes on signals, and ends with the run's exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import WITHOUT_TORCH

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="pid namespaces need root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, of util-linux"),
]

TRAIN = """
import os, signal, subprocess, sys, time

def end(number, frame):
    print("saved", os.environ["RANK"], flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
subprocess.run(["sh", "-c", "sleep 0.2 &"])  # its orphan belongs to the zygote
open(f"ready-{os.environ['RANK']}", "w").close()
while True:
    time.sleep(0.05)
"""


@contextlib.contextmanager
def started(place: Path, command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A command as pid 1 of a pid namespace: the process that waits for it, and itself as seen from here."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": place}
    with subprocess.Popen(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command], **pipes) as waits:
        try:
            init = until(lambda: psutil.Process(waits.pid).children())[0]
            until(lambda: "phalanx" in init.cmdline())
            yield waits, init
        finally:
            waits.kill()


def run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "phalanx", "run", *WITHOUT_TORCH, *arguments]


def until(find: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Waits until ``find`` finds something."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.02)
    return found


def zombies(init: psutil.Process) -> list[int]:
    return [child.pid for child in init.children() if child.status() == psutil.STATUS_ZOMBIE]


def test_orphans_are_reaped_and_a_signal_reaches_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with started(tmp_path, run("--nproc-per-node", "2", "train.py")) as (waits, init):
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
        before = {child.pid for child in init.children()}
        # As `kubectl exec` does: a process that is no descendant of ours leaves an orphan.
        enter = ["nsenter", "--target", str(init.pid), "--pid", "--mount"]
        subprocess.run([*enter, "sh", "-c", "for i in 1 2 3; do sleep 0.3 & done"], check=True)
        assert {child.pid for child in init.children()} - before, "the orphans belong to pid 1"
        until(lambda: {child.pid for child in init.children()} == before, 10.0)
        assert zombies(init) == []
        init.send_signal(signal.SIGTERM)
        out, err = waits.communicate(timeout=30)
    assert waits.returncode == 143, err
    assert err.count("SIGTERM: stopping the ranks") == 1
    assert sorted(line.partition("saved")[2] for line in out.splitlines()) == [" 0", " 1"]


def test_a_signal_counts_before_the_ranks_are_there(tmp_path: Path) -> None:
    """The kernel keeps a signal without a handler from a pid 1."""
    (tmp_path / "train.py").touch()
    where = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "nowhere.invalid", "--master-port", "29500")
    with started(tmp_path, run(*where, "--rdzv-timeout", "15", "train.py")) as (waits, init):
        until(init.children)
        init.send_signal(signal.SIGTERM)
        began = time.monotonic()
        waits.communicate(timeout=30)
    assert waits.returncode == 143
    assert time.monotonic() - began < 5.0


def test_the_exit_code_is_the_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; os.kill(os.getpid(), 9)")
    with started(tmp_path, run("train.py")) as (waits, _):
        waits.communicate(timeout=30)
    assert waits.returncode == 137
