"""px.stop with Ctrl-C at a terminal, and without `phalanx run`."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import WITHOUT_TORCH, first, read_terminal, start
from tests.faults.test_preemption import TRAINS

CTRL_C = b"\x03"


def at_a_terminal(directory: Path, *arguments: str) -> tuple[subprocess.Popen, int]:
    """`phalanx run` as a shell starts it: in the foreground of a terminal, whose other side is returned."""
    primary, other = pty.openpty()

    command = ["setsid", "--ctty", sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", *arguments]
    process = subprocess.Popen(command, cwd=directory, stdin=other, stdout=other, stderr=other)
    os.close(other)
    return process, primary


def await_files(process: subprocess.Popen, paths: list[Path], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert process.poll() is None
        assert time.monotonic() < limit, paths
        time.sleep(0.02)


WITHOUT_PX = """
import os, time
rank = os.environ["RANK"]
try:
    open(f"ready-{rank}", "w").close()
    time.sleep(600)
except KeyboardInterrupt:
    open(f"interrupted-{rank}", "w").close()
    HOW
"""


@pytest.mark.parametrize(
    ("text", "times", "files"),
    [
        (TRAINS, 1, "saved"),
        (WITHOUT_PX.replace("HOW", "raise"), 1, "interrupted"),
        (WITHOUT_PX.replace("HOW", "time.sleep(600)"), 2, "interrupted"),
    ],
)
def test_ctrl_c(text: str, times: int, files: str, tmp_path: Path) -> None:
    """A script that asks px.stop stops at one step; another gets KeyboardInterrupt. The second one kills at once."""
    (tmp_path / "train.py").write_text(text)
    flags = () if text is TRAINS else WITHOUT_TORCH
    process, primary = at_a_terminal(tmp_path, *flags, "train.py", "px.stop", "SIGINT", "0.2")
    await_files(process, [tmp_path / f"ready-{rank}" for rank in range(2)])
    found = [tmp_path / f"{files}-{rank}" for rank in range(2)]
    os.write(primary, CTRL_C)
    if times == 2:
        await_files(process, found)
        began = time.monotonic()
        os.write(primary, CTRL_C)
        assert process.wait(timeout=30) == 130
        assert time.monotonic() - began < 5.0, "ten seconds are what the ranks have after one"
    seen = read_terminal(primary).decode()
    assert process.wait(timeout=30) == 130, seen
    texts = [path.read_text() for path in found]
    assert texts[0] == texts[1], seen
    assert text is not TRAINS or texts[0].endswith(" SIGINT\n")


ALONE = """
import os, signal, sys
import torch.distributed as dist
import phalanx as px
assert not px.stop.requested and px.stop.reason is None
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
if "RANK" in os.environ:
    dist.init_process_group("gloo")
try:
    px.stop.request("the loss is good")
except px.PhalanxError as error:
    print(error, flush=True)
print(px.stop.requested, px.stop.reason, flush=True)
"""


@pytest.mark.parametrize("launcher", first(1, ["none", "torchrun"]))
def test_without_phalanx_run_signals_are_left_alone(launcher: str, tmp_path: Path) -> None:
    """A process that is alone can ask itself to stop; under another launcher nobody would tell the other ranks."""
    (tmp_path / "train.py").write_text(ALONE)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2") if launcher == "torchrun" else ()
    process = start(*torchrun, "train.py", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    if torchrun:
        assert out.count("False None\n") == out.count("px.stop.request needs `phalanx run`: under another") == 2, out
    else:
        assert out == "True the loss is good\n"
