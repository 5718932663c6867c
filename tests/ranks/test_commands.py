"""Every command that the documentation shows is run once, from the place where it says to run it.

What an example has to print is checked here too, on the same run: EXPECTED in tests/ranks/test_examples.py.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import phalanx as px
from phalanx import events, run_files
from phalanx.events import RunFile
from phalanx.status import layout
from phalanx.status.page import StatusPage
from tests.conftest import REPOSITORY, Outcome
from tests.ranks.test_examples import EXPECTED

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "CONTRIBUTING.md"]
FAILS_ON_PURPOSE = {
    "phalanx run --nproc-per-node 4 examples/broken.py": 1,
    "phalanx run --nproc-per-node 4 --stall-after 3 --on-stall kill examples/stuck.py": 1,
}
# `make test` is what runs this; `make demo` is taken apart below; the others are parts of these, or have a short form
# among the tests (tests/native, tests/suite, tests/contact, tests/ranks/test_self_test.py).
MADE_ELSEWHERE = {"make test", "make demo", "make check", "make bench", "make stress", "make suite", "make contact"}
MADE_ELSEWHERE |= {"phalanx test"}
OTHER_VERSIONS = ("make test-torch ", "make test-python ")
"""They load gigabytes; tests/ranks/test_versions.py holds what they run."""


# Commands that differ from one that is run in a flag or in the launcher only, by that one; what these do, others see.
SEEN_IN = {
    "phalanx run --nproc-per-node 2 examples/comm/all_reduce.py": (
        "phalanx run --nproc-per-node 4 examples/comm/all_reduce.py"
    ),
    # The launcher is run with examples/launch_style.py.
    "python -m phalanx.launch --nproc_per_node=4 examples/reference.py": (
        "phalanx run --nproc-per-node 4 examples/reference.py"
    ),
    # test_the_spelling_follows_the_script[use-env]
    "python -m phalanx.launch --use-env --nproc_per_node=4 examples/launch_style.py": (
        "python -m phalanx.launch --nproc_per_node=4 examples/launch_style.py"
    ),
}


def shown() -> list[str]:
    commands: dict[str, None] = {}
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                command = line.partition("#")[0].strip()
                if command and command not in MADE_ELSEWHERE and not command.startswith(OTHER_VERSIONS):
                    commands[command] = None
    return list(commands)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)


def run(command: str, directory: Path) -> Outcome:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    got = subprocess.run(
        shlex.split(command),
        cwd=directory,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Outcome(got.returncode, got.stdout, got.stderr, 0.0)


@pytest.mark.parametrize("command", [each for each in shown() if each not in SEEN_IN])
def test_a_shown_command_works(command: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "train.py").write_text(python_blocks("README.md")[0])
    if command.startswith("phalanx checkpoint"):
        with px.Checkpointer(tmp_path / "checkpoints") as checkpointer:
            checkpointer.save(100, model=nn.Linear(2, 2))
    if command.startswith("phalanx report"):
        (tmp_path / "short.py").write_text("raise ValueError('to be told again')")
        assert run("phalanx run --start-method exec short.py", tmp_path).code == 1
    if command.startswith("phalanx inspect"):
        directory = run_files.new_run_directory(tmp_path / "runs", "20260101-000000-1")
        events.write_record(directory / events.RUN_FILE, RunFile(socket.gethostname(), time.time()))
        StatusPage(layout.status_path(directory, 0))
    outcome = run(command, tmp_path)
    assert outcome.code == FAILS_ON_PURPOSE.get(command, 0), outcome.out + outcome.err
    if command in EXPECTED:
        EXPECTED[command](outcome)


def test_what_is_expected_of_commands_is_looked_at() -> None:
    """An expectation of a command that is shown no more would never be tested."""
    assert set(SEEN_IN) <= set(shown())
    assert set(EXPECTED) | set(SEEN_IN.values()) <= set(shown()) - set(SEEN_IN)


def test_make_demo_runs_the_main_job() -> None:
    """Its set-up is what has made this environment; its command is one of those above."""
    makefile = (REPOSITORY / "Makefile").read_text()
    recipe = re.findall(r"^demo:.*\n\t(.*)$", makefile, re.MULTILINE)
    assert recipe == ["$(BIN)/phalanx run --nproc-per-node 2 examples/digits.py"]
    assert recipe[0].removeprefix("$(BIN)/") in shown()


@pytest.mark.long
def test_make_demo_fault_survives_two_kills(tmp_path: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    assert re.findall(r"^demo-fault:.*\n\t(.*)$", makefile, re.MULTILINE) == [
        "PYTHON=$(BIN)/python examples/survive.sh"
    ]
    environment = {**os.environ, "PYTHON": sys.executable, "PET_LOG_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment["PET_PRELOAD"] = "sklearn.datasets"  # once for a run, not on 4 ranks in each of its attempts
    command = [REPOSITORY / "examples/survive.sh", "--epochs", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(
        "the same receipt: every sample once, and the same weights to the last bit (backend shm)\n"
    )
    assert done.stdout.count("samples    4320 of 4320 seen (3 epochs of 1440), 0 twice") == 2
    checksums = re.findall(r"replicas   equal, checksum (\w{12})", done.stdout)
    assert len(checksums) == 2
    assert len(set(checksums)) == 1
    for rank, attempt in ((1, 2), (3, 3)):
        assert f"phalanx: rank {rank} failed: SIGKILL" in done.stderr
        assert re.search(rf"attempt {attempt} from step [34567]0, epoch", done.stderr), done.stderr
    assert not list(tmp_path.glob("tmp*")), "its files are removed"


def test_the_example_of_run_ranks_is_true(run_ranks: Any) -> None:
    (example,) = [block for block in python_blocks("docs/join.md") if "run_ranks" in block]
    names: dict[str, Any] = {"__name__": "join"}
    exec(compile(example, "docs/join.md", "exec"), names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    test()
