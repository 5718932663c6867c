"""Every command that the documentation shows is run, from the place where it says to run it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import phalanx as px
from tests.conftest import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "CONTRIBUTING.md"]
FAILS_ON_PURPOSE = {"phalanx run --nproc-per-node 4 examples/broken.py": 1}
# `make test` is what runs this; `make demo` is taken apart below; the others are parts of these, or have a short form
# among the tests (tests/native, tests/suite).
MADE_ELSEWHERE = {"make test", "make demo", "make check", "make bench", "make stress", "make suite"}


def shown() -> list[str]:
    commands: dict[str, None] = {}
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                command = line.partition("#")[0].strip()
                if command and command not in MADE_ELSEWHERE:
                    commands[command] = None
    return list(commands)


def the_readmes_script() -> str:
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)[0]


def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = shlex.split(command)
    return subprocess.run(
        words, cwd=directory, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("command", shown())
def test_a_shown_command_works(command: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "train.py").write_text(the_readmes_script())
    if command.startswith("phalanx checkpoint"):
        with px.Checkpointer(tmp_path / "checkpoints") as checkpointer:
            checkpointer.save(100, model=nn.Linear(2, 2))
    got = run(command, tmp_path)
    assert got.returncode == FAILS_ON_PURPOSE.get(command, 0), got.stdout + got.stderr


def test_make_demo_runs_the_main_job() -> None:
    """Its set-up is what has made this environment; its command is one of those above."""
    makefile = (REPOSITORY / "Makefile").read_text()
    recipe = re.findall(r"^demo:.*\n\t(.*)$", makefile, re.MULTILINE)
    assert recipe == ["$(BIN)/phalanx run --nproc-per-node 2 examples/digits.py"]
    assert recipe[0].removeprefix("$(BIN)/") in shown()


def test_the_readmes_script_prints_what_it_should(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(the_readmes_script())
    alone = re.fullmatch(r"1 ranks, loss (0\.\d+)\n", run("python train.py", tmp_path).stdout)
    together = re.findall(
        r"\[rank 0\] 4 ranks, loss (0\.\d+)\n", run("phalanx run --nproc-per-node 4 train.py", tmp_path).stdout
    )
    assert alone is not None
    assert float(alone[1]) < 0.01
    assert len(together) == 1


def test_the_example_of_run_ranks_is_true(tmp_path: Path) -> None:
    (example,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/join.md").read_text(), re.DOTALL)
        if "run_ranks" in block
    ]
    (tmp_path / "test_it.py").write_text(example)
    assert "1 passed" in run("python -m pytest -q test_it.py", tmp_path).stdout
