"""`phalanx run` on real processes: environment, output, devices, ports, the table."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from phalanx import events, messages
from phalanx.diagnose.run_directory import read_events
from phalanx.events import RunFile
from phalanx.system import cgroups
from tests.conftest import WITHOUT_TORCH, Runner, by_rank, free_port, read_terminal, start


def test_the_environment_is_torchruns(phalanx: Runner, script, tmp_path: Path) -> None:
    """The same script under torchrun and under phalanx: every variable that torchrun sets has the same value."""
    name = script(
        "import os, json; json.dump(dict(os.environ), open(f\"{os.environ['OUT']}-{os.environ['RANK']}\", 'w'))"
    )
    for launcher in (["torch.distributed.run", "--standalone"], ["phalanx", "run", *WITHOUT_TORCH, "--standalone"]):
        out = tmp_path / launcher[0]
        subprocess.run(
            [sys.executable, "-m", *launcher, "--nproc-per-node=2", "--role=trainer", "--max-restarts=1", name],
            cwd=tmp_path,
            env={**os.environ, "OUT": str(out)},
            capture_output=True,
            check=True,
        )
    for rank in range(2):
        theirs, ours = (
            json.loads((tmp_path / f"{kind}-{rank}").read_text()) for kind in ("torch.distributed.run", "phalanx")
        )
        added = {key for key in theirs if os.environ.get(key) != theirs[key]} - {"OUT"}
        different = {key for key in added if ours.get(key) != theirs[key]}
        # A run's own name and port, and the address by which torchrun calls this machine; ours is loopback.
        own = {"TORCHELASTIC_RUN_ID", "MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
        also_own = {"TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"}
        assert different <= own | also_own, {key: (theirs[key], ours.get(key)) for key in different}
        assert ours["OMP_NUM_THREADS"] == str(max(1, cgroups.usable_cores() // 2))


def test_the_run_directory_and_the_line_about_threads(phalanx: Runner, script, latest: Path) -> None:
    name = script(
        "import os, sys; print('out', os.environ['RANK'], os.environ['OMP_NUM_THREADS']); print('err', file=sys.stderr)"
    )
    usable = cgroups.usable_cores()
    threads = max(1, usable // 2)
    outcome = phalanx("run", *WITHOUT_TORCH, "--nproc-per-node", "2", name)
    assert outcome.code == 0
    assert f"OMP_NUM_THREADS={threads} for each (cores {usable}, divided by ranks)" in outcome.err
    assert sorted(outcome.err.splitlines()[1:]) == ["[rank 0] err", "[rank 1] err"]
    assert stat.S_IMODE(latest.stat().st_mode) == 0o700
    assert sorted(path.name for path in latest.iterdir()) == [
        *("agent.events.jsonl", "rank-0.log", "rank-0.stacks", "rank-0.status"),
        *("rank-1.log", "rank-1.stacks", "rank-1.status", "report.json", "run.json"),
    ]
    assert sorted((latest / "rank-1.log").read_text().splitlines()) == ["err", f"out 1 {threads}"]
    spec = json.loads((latest / "run.json").read_text())
    assert (spec["spec"]["nproc_per_node"], spec["prefix"]) == (2, sys.prefix)
    assert json.loads((latest / "report.json").read_text())["exit_code"] == 0
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in latest.iterdir())
    outcome = phalanx("run", *WITHOUT_TORCH, "--nproc-per-node", "2", name, env={"OMP_NUM_THREADS": "7"})
    assert by_rank(outcome) == {0: ["out 0 7"], 1: ["out 1 7"]}
    assert "OMP_NUM_THREADS" not in outcome.err


def test_what_a_rank_reports_is_checked_by_the_agent(phalanx: Runner, script, latest: Path) -> None:
    """The rank imports nothing foreign before its script, and its script can write anything into the report."""
    text = r"""
    import os, stat, sys
    assert not {"msgspec", "typing_extensions", "numpy", "torch", "psutil"} & set(sys.modules)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.write(fd, b'{"error": 1}\n{"error": {}}\n{"notice": 5}\n{"thread": [[[[\n\xff\x00\n')
    raise ValueError(sys.argv[1])
    """
    outcome = phalanx("run", *WITHOUT_TORCH, script(text), "caf\udce9")
    assert outcome.code == 1
    assert "ValueError: caf" in outcome.err
    noted = read_events(latest / events.AGENT_EVENTS)
    (malformed,) = (event for event in noted if event["event"] == "malformed")
    assert malformed["text"].startswith(
        "the report of rank 0 holds what phalanx did not write there (Expected `object | null`"
    )
    error = messages.decode(events.error_path(latest, 0).read_bytes(), events.ErrorRecord, "here")
    assert (error.rank, error.message, error.frames[-1].source) == (0, "caf\udce9", "raise ValueError(sys.argv[1])")
    order = messages.decode((latest / events.RUN_FILE).read_bytes(), RunFile, "here")
    assert order.command[-1] == "caf\udce9"


@pytest.mark.parametrize("flags", [(), WITHOUT_TORCH], ids=["fork", "exec"])
def test_one_rank_prints_as_if_alone_in_the_launchers_environment(flags: tuple[str, ...], phalanx: Runner, script):
    """M17: the launcher's interpreter by its full path, whatever `python` means on PATH."""
    name = script(
        """
        import sys
        print(sys.executable, sys.prefix)
        sys.stdout.write('\\r 50%\\r100%')
        print('!', file=sys.stderr)
        """
    )
    outcome = phalanx("run", *flags, name, env={"PATH": "/usr/bin:/bin"})
    assert (outcome.out, outcome.err) == (f"{sys.executable} {sys.prefix}\n\r 50%\r100%", "!\n")


def test_lines_of_many_ranks_stay_whole_and_in_order(phalanx: Runner, script, latest: Path) -> None:
    name = script(
        """
        import os, sys, time
        rank = os.environ["RANK"]
        for number in range(2000):
            for piece in (f"{rank}:", f"{number}", ":end\\n"):     # a line in three writes
                os.write(1, piece.encode())
        """
    )
    outcome = phalanx("run", *WITHOUT_TORCH, "--nproc-per-node", "4", name)
    expected = {rank: [f"{rank}:{number}:end" for number in range(2000)] for rank in range(4)}
    assert by_rank(outcome) == expected
    assert (latest / "rank-3.log").read_text().splitlines() == expected[3]


@pytest.mark.alone
def test_a_loud_rank_loses_nothing_and_stalls_nobody(phalanx: Runner, script, tmp_path: Path) -> None:
    """60 MB from one rank as fast as it can, while the other notes how long its own prints take."""
    name = script(
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            block = b"".join(b"%07d " % n + b"x" * 91 + b"\\n" for n in range(10000))   # 1 MB
            for _ in range(60):
                view = memoryview(block)
                while view:
                    view = view[os.write(1, view):]
        else:
            slowest = 0.0
            for number in range(100):
                began = time.monotonic()
                print("quiet", number)
                slowest = max(slowest, time.monotonic() - began)
                time.sleep(0.01)
            open("slowest", "w").write(str(slowest))
        """
    )
    with (tmp_path / "console").open("wb") as console:
        outcome = phalanx("run", *WITHOUT_TORCH, "--nproc-per-node", "2", name, stdout=console)
    assert outcome.code == 0
    log = tmp_path / "runs/latest/rank-0.log"
    assert log.stat().st_size == 60 * 1_000_000
    loud = quiet = 0
    with (tmp_path / "console").open("rb") as lines:
        for line in lines:
            if line.startswith(b"[rank 0] "):
                assert line == b"[rank 0] %07d " % (loud % 10000) + b"x" * 91 + b"\n"
                loud += 1
            else:
                assert line == b"[rank 1] quiet %d\n" % quiet
                quiet += 1
    assert (loud, quiet) == (600_000, 100)
    assert float((tmp_path / "slowest").read_text()) < 0.5


def test_redirects_tee_and_filter(phalanx: Runner, script, tmp_path: Path) -> None:
    name = script("import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)")
    flags = (
        *WITHOUT_TORCH,
        "--nproc-per-node",
        "3",
        "--log-dir",
        "logs",
        "-r",
        "0:1",
        "-t",
        "1:3",
        "--local-ranks-filter",
        "0,1",
    )
    outcome = phalanx("run", *flags, name)
    assert by_rank(outcome) == {1: ["out 1"]}
    errors = [line for line in outcome.err.splitlines() if line.startswith("[rank")]
    assert sorted(errors) == ["[rank 0] err 0", "[rank 1] err 1"]
    files = {
        str(path.relative_to(tmp_path / "logs/latest")): path.read_text()
        for path in (tmp_path / "logs/latest").rglob("*.log")
    }
    assert files == {
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/1/stdout.log": "out 1\n",
        "attempt_0/1/stderr.log": "err 1\n",
        **{f"rank-{rank}.log": files[f"rank-{rank}.log"] for rank in range(3)},
    }
    assert sorted(files["rank-2.log"].splitlines()) == ["err 2", "out 2"]


def test_devices(phalanx: Runner, script) -> None:
    name = script("import os; print(os.environ['LOCAL_RANK'], os.environ.get('CUDA_VISIBLE_DEVICES'))")
    chosen = phalanx("run", *WITHOUT_TORCH, "--devices", "0,3", name, env={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert by_rank(chosen) == {0: ["0 0,3"], 1: ["1 0,3"]}
    visible = phalanx("run", *WITHOUT_TORCH, "--nproc-per-node", "gpu", name, env={"CUDA_VISIBLE_DEVICES": "0,3"})
    assert by_rank(visible) == {0: ["0 0,3"], 1: ["1 0,3"]}
    flags = (*WITHOUT_TORCH, "--devices", "1,0", "--virtual-local-rank")
    virtual = phalanx("run", *flags, name, env={"CUDA_VISIBLE_DEVICES": "4,6"})
    assert by_rank(virtual) == {0: ["0 6"], 1: ["0 4"]}


def test_an_asked_for_port_is_used(phalanx: Runner, script) -> None:
    port = str(free_port())
    joined = script("import os, torch.distributed as d; d.init_process_group('gloo'); print(os.environ['MASTER_PORT'])")
    assert phalanx("run", "--master_port", port, joined).out == f"{port}\n"
    name = script("import os; print(os.environ['MASTER_PORT'])")
    endpoint = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
    assert phalanx("run", *WITHOUT_TORCH, *endpoint, name).out == f"{port}\n"


def test_nothing_listens_to_the_outside(script, tmp_path: Path) -> None:
    name = script(
        """
        import time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.new_group([0, 1])
        print("up", flush=True)
        input()
        """
    )
    agent = start("-m", "phalanx", "run", "--nproc-per-node", "2", name, cwd=tmp_path, stdin=subprocess.PIPE)
    assert agent.stdout is not None
    for _ in range(2):
        assert "up" in agent.stdout.readline()
    processes = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    listening = [c.laddr for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    agent.communicate("\n\n")
    assert len(processes) == 5
    assert len(listening) >= 3  # the store and a gloo socket in each rank
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_dry_run_shows_24_ranks(phalanx: Runner, tmp_path: Path) -> None:
    outcome = phalanx(
        "run",
        "--nnodes",
        "3",
        "--nproc-per-node",
        "8",
        "--master-addr",
        "10.0.0.1",
        "--dry-run",
        "train.py",
        "--lr",
        "1",
    )
    assert outcome.code == 0
    assert "3 nodes × 8 processes = 24 ranks" in outcome.out
    rows = [line.split() for line in outcome.lines if "RANK=" in line and "LOCAL_RANK=" in line]
    assert [row[:4] for row in rows] == [[str(rank // 8), str(rank), str(rank % 8), "cpu"] for rank in range(24)]
    assert rows[17][4:6] == ["RANK=17", "LOCAL_RANK=1"]
    assert "WORLD_SIZE=24" in outcome.out
    assert "MASTER_ADDR=10.0.0.1" in outcome.out
    assert "python train.py --lr 1" in outcome.out
    assert sys.prefix in outcome.out
    assert not (tmp_path / "runs").exists()


def test_dry_run_shows_the_gpus(phalanx: Runner) -> None:
    outcome = phalanx("run", "--devices", "0,3", "--dry-run", "--nproc-per-node", "4", "train.py")
    assert re.findall(r"cuda:\d", outcome.out) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert "CUDA_VISIBLE_DEVICES=0,3" in outcome.out


@pytest.mark.alone
def test_help_is_quick_and_teaches(phalanx: Runner) -> None:
    outcome = phalanx("run", "--help")
    assert outcome.code == 0
    for flag in ("--nproc-per-node", "--max-restarts", "--dry-run", "examples:"):
        assert flag in outcome.out
    assert phalanx("--help").seconds < 1.0
    assert phalanx("--version").out.startswith("phalanx 0.")


@pytest.mark.parametrize("arguments", [["walk"], ["run"], ["run", "--nproc-per-node", "x", "train.py"]])
def test_a_wrong_command_line_is_one_sentence(arguments: list[str], phalanx: Runner) -> None:
    outcome = phalanx(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert len(outcome.err.splitlines()) == 1
    assert outcome.err.startswith("phalanx: ")


def test_a_progress_bar_of_every_rank(script, tmp_path: Path) -> None:
    """On a terminal, unfinished lines are shown live and never mixed into other lines."""
    import pty

    name = script(
        """
        import os, sys, time
        for percent in range(0, 101, 10):
            sys.stdout.write(f"\\r{percent:3}% of rank {os.environ['RANK']}")
            sys.stdout.flush()
            time.sleep(0.02)
        print()
        """
    )
    primary, secondary = pty.openpty()
    flags = (*WITHOUT_TORCH, "--nproc-per-node", "2")
    agent = start("-m", "phalanx", "run", *flags, name, cwd=tmp_path, stdout=secondary, stderr=secondary)
    os.close(secondary)
    shown = read_terminal(primary)
    assert agent.wait(timeout=20) == 0
    lines = re.sub(rb"\x1b\[\d*m", b"", shown).replace(b"\r\n", b"\n").split(b"\n")
    final = [line.rpartition(b"\x1b[K")[2] for line in lines if b"100%" in line]
    assert sorted(final) == [b"[rank 0] 100% of rank 0", b"[rank 1] 100% of rank 1"]


def test_a_prompt_is_shown_before_its_newline(script, tmp_path: Path) -> None:
    import pty

    name = script(
        """
        import os
        if os.environ["RANK"] == "0":
            print("name?", end=" ", flush=True)
            print("hello", input())
        """
    )
    primary, secondary = pty.openpty()
    agent = start(
        *("-m", "phalanx", "run", *WITHOUT_TORCH, "--nproc-per-node", "2", name),
        cwd=tmp_path,
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
    )
    os.close(secondary)
    shown = b""
    deadline = time.monotonic() + 20
    while b"name? " not in shown and time.monotonic() < deadline:
        shown += os.read(primary, 4096)
    os.write(primary, b"Ada\n")
    shown += read_terminal(primary)
    assert agent.wait(timeout=20) == 0
    assert b"hello Ada" in shown
