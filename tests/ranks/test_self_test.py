"""`phalanx test`: for real, where the environment is against it, and with runs that fail or hang."""

from __future__ import annotations

import ast
import json
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from phalanx import world as worlds
from phalanx.errors import UsageError
from phalanx.self_test import checks, command
from phalanx.self_test.results import Result
from tests.conftest import REPOSITORY, Runner, start

NAMES = ["start", "collectives", "ddp", "data_parallel", "checkpoint", "restart"]
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "a,b",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2",
}
RANK = {
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "192.0.2.9",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RESTART_COUNT": "5",
    "PHALANX_STORE": "192.0.2.9:1",
}


def test_everything_passes_here_in_a_hostile_environment(phalanx: Runner, tmp_path: Path) -> None:
    """In a rank of another run, in a SLURM job of two nodes, beside files with the names of modules."""
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not the module that was meant')\n")
    (tmp_path / "tmp").mkdir()
    env = {**SLURM, **RANK, "PET_NNODES": "2", "PET_MAX_RESTARTS": "0", "TMPDIR": str(tmp_path / "tmp")}
    outcome = phalanx("test", "--json", env=env, timeout=180)
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert [check["name"] for check in report["checks"]] == NAMES
    assert not any(check["failed"] for check in report["checks"])
    assert report["ranks"] == 2
    assert set(report["software"]) == {"phalanx", "torch", "Python", "system"}
    assert report["checks"][-1]["detail"] == "resumed at step 3"
    shown = [line.split()[2] for line in outcome.err.splitlines() if line.startswith("phalanx test: ")]
    assert shown == NAMES, "each is told as it ends"
    assert list((tmp_path / "tmp").iterdir()) == [], "nothing is left"


WRONG_ON_RANK_1 = """
import os, sys

if any("process.zygote" in word for word in sys.orig_argv):
    import torch.distributed as dist

    plain = dist.all_reduce

    def wrong(tensor, *args, **options):
        work = plain(tensor, *args, **options)
        tensor += int(os.environ.get("RANK") == "1")
        return work

    dist.all_reduce = wrong
"""


def test_a_collective_that_is_wrong(phalanx: Runner, tmp_path: Path) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(WRONG_ON_RANK_1)
    outcome = phalanx("test", "--nproc-per-node", "2", env={"PYTHONPATH": str(tmp_path / "hook")}, timeout=120)
    assert outcome.code == 1
    rows = {line.split()[0]: line for line in outcome.out.partition("\n\n")[2].splitlines()}
    assert list(rows) == NAMES
    assert " ok " in rows["start"]
    assert rows["collectives"].endswith("rank 1: AssertionError: all_reduce on cpu gave 4, not 3")
    assert " FAILED " in rows["collectives"]
    assert [name for name, row in rows.items() if " not run " in row] == NAMES[2:]


def test_any_number_of_ranks_trains_as_one_process(run_ranks) -> None:
    def train(rank: int) -> str:
        return checks.ddp(worlds.current())

    assert all("largest difference" in told for told in run_ranks(train, 3))


def test_gpus_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_run", lambda *_: [Result("start", False, 1.0, "on the CPU", 3)])
    start, restart = command._report(tmp_path, None).checks
    assert start.failed
    assert start.detail == "3 GPUs are counted here, and torch can use none: `phalanx doctor` tells more"
    assert (restart.name, restart.failed, restart.ranks) == ("restart", False, 0)


ON_SIM = """
import sys

if any("process.zygote" in word for word in sys.orig_argv):
    from tests.devices import sim, simccl
"""


def test_on_the_simulated_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the collectives, most of which its backend has not got, and without the second run, to save time."""
    (tmp_path / "sitecustomize.py").write_text(ON_SIM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    names = [name for name in NAMES if name not in ("collectives", "restart")]
    results = command._run(tmp_path, "2", names, set())
    assert [result.name for result in results if not result.failed] == names, results
    assert results[0].detail == "1 × sim"


def test_nothing_is_left_when_it_is_terminated(tmp_path: Path) -> None:
    """The leak police would find its ranks."""
    (tmp_path / "tmp").mkdir()
    process = start(
        "-m", "phalanx", "test", "--nproc-per-node", "1", cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")}
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("phalanx test: start"), "a run is under way"
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert list((tmp_path / "tmp").iterdir()) == []


def played(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """`phalanx run` is this program; it finds the directory and ``write(name, failed, rank)``."""
    head = """
        import sys, time
        from pathlib import Path
        from phalanx import messages
        from phalanx.self_test.results import Result, results_path

        at = sys.argv.index("phalanx.self_test.checks")
        directory, names = Path(sys.argv[at + 1]), sys.argv[at + 3 :]

        def write(name, failed=False, rank=0, detail=""):
            with results_path(directory, rank).open("ab") as file:
                file.write(messages.encode(Result(name, failed, 1.0, detail, 2)) + b"\\n")

    """
    program = textwrap.dedent(head) + textwrap.dedent(text)
    monkeypatch.setattr(command, "python_command", lambda call: [sys.executable, "-c", program])


def report(tmp_path: Path, asked: int | None = 2) -> dict[str, Result]:
    return {check.name: check for check in command._report(tmp_path, asked).checks}


def test_a_rank_that_ends_without_a_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    played(
        monkeypatch,
        """
        for rank in (0, 1):
            write("start", rank=rank)
        write("collectives")
        print("phalanx: rank 1 failed: SIGSEGV, invalid memory access")
        sys.exit(139)
        """,
    )
    found = report(tmp_path)
    assert not found["start"].failed
    assert found["collectives"].failed, "rank 1 has not passed it"
    assert found["collectives"].detail == "phalanx: rank 1 failed: SIGSEGV, invalid memory access"
    assert (found["ddp"].failed, found["ddp"].ranks) == (False, 0)


def test_a_run_that_fails_at_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    played(monkeypatch, "[write(name, rank=rank) for name in names for rank in (0, 1)]; sys.exit('abort')")
    found = report(tmp_path)
    assert list(found) == NAMES
    assert (found["checkpoint"].failed, found["checkpoint"].detail) == (True, "abort")
    assert not found["ddp"].failed


def test_a_run_that_is_killed_and_one_that_only_speaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    played(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert report(tmp_path)["start"].detail == "exit code -9"
    played(monkeypatch, "print('phalanx: 2 ranks, logs in runs'); print('phalanx: cannot import torch'); sys.exit(2)")
    assert report(tmp_path)["start"].detail == "phalanx: cannot import torch"


def test_a_run_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    played(monkeypatch, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwrite('start')\ntime.sleep(60)")
    monkeypatch.setattr(command, "_LIMIT", 1.0)
    monkeypatch.setattr(command, "_STOPPING", {"terminate": 0.5, "kill": 5.0})
    began = time.monotonic()
    assert report(tmp_path)["start"].detail == "not done after 1 s"
    assert time.monotonic() - began < 20


def test_gpus_are_counted_by_phalanx_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    played(
        monkeypatch,
        f"""
        ranks = sys.argv[sys.argv.index("--nproc-per-node") + 1]
        open({str(asked)!r}, "a").write(ranks + " ")
        [write(name, rank=rank) for name in names for rank in (0, 1)]
        """,
    )
    monkeypatch.setattr(command, "_TOGETHER", ["start"])
    assert list(report(tmp_path, None)) == ["start", "restart"]
    assert asked.read_text().split() == ["gpu", "2"], "the second run has as many ranks as the first"


@pytest.mark.parametrize("count", ["0", "-1", "1025", "99999999999999999999"])
def test_ranks_that_cannot_be(count: str) -> None:
    with pytest.raises(UsageError, match=f"--nproc-per-node is {count}; give from 1 to 1024"):
        command.main(["--nproc-per-node", count])


def test_no_directory_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.tempfile, "tempdir", "/proc/phalanx")
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    with pytest.raises(UsageError, match="temporary files: No such file or directory; set TMPDIR"):
        command.main([])


def test_checks_do_not_depend_on_assert() -> None:
    """PYTHONOPTIMIZE drops every assert: all checks would pass."""
    tree = ast.parse(Path(checks.__file__).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
