"""Something fails, or another signal comes, while a run stops."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import start

SCRIPT = """
import os, signal, sys, time
import torch

how, rank = sys.argv[1], int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(2, 1)
flag = []
optimizer = None if how == "early" else torch.optim.SGD(model.parameters(), lr=0.1)
if how in ("handles", "fails"):
    signal.signal(signal.SIGTERM, lambda number, frame: flag.append(number))
    stopped = lambda: bool(flag)
else:
    import phalanx as px
    stopped = lambda: px.stop.requested
if how == "notice":
    signal.signal(signal.SIGUSR1, lambda number, frame: print("notice", flush=True))
if how == "early":
    stopped()
    open(f"ready-{rank}", "w").close()
    while not stopped():
        time.sleep(0.01)
    sys.exit()
for step in range(1, 100_000):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if step == 3:
        open(f"ready-{rank}", "w").close()
    if stopped():
        open(f"stopped-{rank}", "w").write(str(step))
        if how == "unsaved":
            if rank == 0:
                raise OSError("disk full")
            time.sleep(600)
        break
    if step == 5 and how in ("fails", "agreeing"):
        if attempt:
            break
        if how == "agreeing":
            time.sleep(1.5)
        if rank == 1:
            raise RuntimeError("boom")
"""


def run(
    directory: Path, name: str, how: str, *flags: str, meanwhile: Callable[[int], None] = lambda pid: None
) -> tuple[int, str, str]:
    """Two ranks; ``meanwhile`` is called with the agent's pid when both have stepped."""
    process = start(
        *("-m", "phalanx", "run", "--nproc-per-node", "2", "--shutdown-timeout", "2", *flags, name, how), cwd=directory
    )
    limit = time.monotonic() + 60
    while not all((directory / f"ready-{rank}").exists() for rank in range(2)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "the ranks did not begin"
        time.sleep(0.01)
    meanwhile(process.pid)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def usr1(pid: int) -> None:
    os.kill(pid, signal.SIGUSR1)


def stopped_at(directory: Path) -> list[str]:
    return [(directory / f"stopped-{rank}").read_text() for rank in range(2)]


def test_a_failure_is_a_failure_though_the_ranks_handle_sigterm(script, tmp_path: Path) -> None:
    """The SIGTERM by which the agent ends the other ranks is no request to stop."""
    code, _, err = run(tmp_path, script(SCRIPT), "fails", "--max-restarts", "1")
    assert code == 0, err
    assert "starting again, attempt 2 of 2" in err
    assert "SIGTERM: stopping" not in err


def test_a_rank_that_fails_at_the_stop_ends_the_others(script, tmp_path: Path) -> None:
    code, _, err = run(tmp_path, script(SCRIPT), "unsaved", meanwhile=usr1)
    assert code in (1, 138), err  # by the failure, if it comes before the agent has seen all ranks stop
    assert "rank 0 failed" in err


def test_a_failure_while_the_ranks_agree_on_a_step(script, tmp_path: Path) -> None:
    """The agreement ends with its attempt: the next one is not stopped by it."""
    flags = ("--max-restarts", "1", "--shutdown-timeout", "20")
    code, _, err = run(tmp_path, script(SCRIPT), "agreeing", *flags, meanwhile=usr1)
    assert code == 0, err
    assert "stopped by" not in err


def test_sigterm_while_the_ranks_agree_on_a_notice(script, tmp_path: Path) -> None:
    def both(pid: int) -> None:
        usr1(pid)
        os.kill(pid, signal.SIGTERM)

    code, out, err = run(tmp_path, script(SCRIPT), "notice", meanwhile=both)
    assert code == 143, err
    assert out.count("notice") == 2
    first, second = stopped_at(tmp_path)
    assert first == second


def test_a_notice_that_nobody_handles_does_not_spoil_the_next_signal(script, tmp_path: Path) -> None:
    def then_sigterm(pid: int) -> None:
        usr1(pid)
        time.sleep(0.5)
        os.kill(pid, signal.SIGTERM)

    code, _, err = run(tmp_path, script(SCRIPT), "handles", meanwhile=then_sigterm)
    assert code == 143, err
    assert "SIGUSR1: the script neither handles it nor asks px.stop, so the ranks continue" in err
    first, second = stopped_at(tmp_path)
    assert first == second


def test_a_notice_before_the_first_step(script, tmp_path: Path) -> None:
    """Nobody steps, so each rank gets it at once; a scheduler is to see that the run was stopped."""
    code, _, err = run(tmp_path, script(SCRIPT), "early", meanwhile=usr1)
    assert code == 138, err
    report = json.loads(next((tmp_path / "runs").glob("*/report.json")).read_text())
    assert report["stop"]["by"] == "SIGUSR1"
