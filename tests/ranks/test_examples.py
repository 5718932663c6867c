"""Every example is run, and what it prints is compared with what the collective means."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, Outcome, Runner, by_rank

COMM = REPOSITORY / "examples" / "comm"
RANKS = 4


def test_every_pattern_has_its_example() -> None:
    assert {path.stem for path in COMM.glob("*.py")} - {"show"} == set(MEANING)


Held = list[Any]
"""What each rank holds at one moment, by rank."""


def summed(held: Held) -> list[int]:
    return [sum(column) for column in zip(*held, strict=True)]


def largest(held: Held) -> list[int]:
    return [max(column) for column in zip(*held, strict=True)]


def everywhere(value: Any) -> Held:
    return [value] * RANKS


# For each example: the moment after, the moment before, and what the one must be, given the other.
MEANING: dict[str, list[tuple[str, str, Callable[[Held], Held]]]] = {
    "all_gather": [
        ("after, a list", "before", everywhere),
        ("after, a tensor", "before", lambda held: everywhere([n for part in held for n in part])),
    ],
    "all_reduce": [
        ("after SUM", "before", lambda held: everywhere(summed(held))),
        ("after MAX", "before", lambda held: everywhere(largest(held))),
        ("mean", "before", lambda held: everywhere([n / RANKS for n in summed(held)])),
    ],
    "all_to_all": [
        ("after", "before", lambda held: [list(column) for column in zip(*held, strict=True)]),
        (
            "after, uneven",
            "before, uneven",
            lambda held: [[s for s in range(4) for _ in range(r + 1)] for r in range(4)],
        ),
    ],
    "asynchronous": [
        ("after all_reduce", "before all_reduce", lambda held: everywhere(summed(held))),
        ("after broadcast", "before broadcast", lambda held: everywhere(held[-1])),
        ("after all_gather", "before all_gather", lambda held: everywhere([[r] for r in range(RANKS)])),
    ],
    "barrier": [("after", "before", lambda held: everywhere("4 of 4 have come"))],
    "broadcast": [("after", "before", lambda held: everywhere(held[-1]))],
    "gather": [("after", "before", lambda held: [held, None, None, None])],
    "isend_irecv": [
        ("after the line", "before the line", lambda held: [held[0], [0, 0], [10, 10], [20, 20]]),
        ("after the ring", "before the line", lambda held: [[31, 31], [1, 1], [11, 11], [21, 21]]),
    ],
    "objects": [
        ("after broadcast", "before broadcast", lambda held: everywhere(held[0])),
        ("after all_gather", "before all_gather", everywhere),
        ("after gather", "before gather", lambda held: [held, None, None, None]),
        ("after scatter", "before scatter", lambda held: [[task] for task in held[0]]),
    ],
    "reduce": [
        ("after", "before", lambda held: [summed(held), *["nothing to rely on; the sum is on rank 0"] * (RANKS - 1)])
    ],
    "reduce_scatter": [("after", "before", lambda held: [summed(held)[2 * r : 2 * r + 2] for r in range(RANKS)])],
    "scatter": [("after", "before", lambda held: held[0])],
    "send_recv": [("after", "before", lambda held: [[106, 106], [101, 101], [103, 103], [106, 106]])],
    "subgroups": [
        ("after all_reduce", "before all_reduce", lambda held: [summed(held[r % 2 :: 2]) for r in range(RANKS)]),
        ("after broadcast", "before broadcast", lambda held: [held[r % 2] for r in range(RANKS)]),
    ],
}


def held_at(outcome: Outcome) -> dict[str, Held]:
    """``[rank 1] before  rank 1: [1, 1]`` of every rank, sorted by moment."""
    moments: dict[str, Held] = {}
    for rank, lines in by_rank(outcome).items():
        for line in lines:
            moment, number, text = re.fullmatch(r"(.*?) +rank (\d): (.*)", line).groups()  # type: ignore[union-attr]
            assert int(number) == rank
            try:
                value = ast.literal_eval(text)
            except (SyntaxError, ValueError):
                value = text
            moments.setdefault(moment, [None] * RANKS)[rank] = value
    return moments


@pytest.mark.parametrize("name", sorted(MEANING))
def test_an_example_of_communication(name: str, phalanx: Runner) -> None:
    outcome = phalanx("run", "--nproc-per-node", str(RANKS), str(COMM / f"{name}.py"))
    assert outcome.code == 0, outcome.err
    assert sorted(by_rank(outcome)) == list(range(RANKS)), "every rank shows what it holds"
    moments = held_at(outcome)
    for after, before, meaning in MEANING[name]:
        assert moments[after] == meaning(moments[before]), after


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "phalanx", "run", "--nproc-per-node", "4", "examples/reference.py"],
        ["-m", "phalanx.launch", "--nproc_per_node=4", "examples/reference.py"],
        ["examples/reference.py", "--spawn", "4"],
    ],
    ids=["run", "launch", "spawn"],
)
def test_the_reference_experiment_in_three_ways(command: list[str], tmp_path: Path) -> None:
    """M13: on 4 ranks each epoch prints, for every rank, 32 steps (32 × 32 × 4 = 4096)."""
    command = [str(REPOSITORY / part) if part.startswith("examples") else part for part in command]
    got = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert got.returncode == 0, got.stderr
    found = re.findall(r"epoch (\d) rank (\d): 32 steps × batch 32 × 4 ranks = 4096 samples, loss ([\d.]+)", got.stdout)
    assert sorted((int(epoch), int(rank)) for epoch, rank, _ in found) == [(e, r) for e in range(2) for r in range(4)]
    losses = {epoch: {loss for e, _, loss in found if e == epoch} for epoch, _, _ in found}
    assert all(len(values) == 1 for values in losses.values()), "the loss is one and the same on all ranks"


def test_the_reference_alone_equals_one_process_torch(tmp_path: Path) -> None:
    got = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples/reference.py")], cwd=tmp_path, capture_output=True, text=True
    )
    assert "epoch 0 rank 0: 128 steps × batch 32 × 1 ranks = 4096 samples" in got.stdout, got.stderr


@pytest.mark.parametrize("spelling", ["local_rank", "local-rank", "use-env"])
def test_a_script_of_torch_distributed_launch_runs_unchanged(spelling: str, tmp_path: Path) -> None:
    flags = ["--use_env"] if spelling == "use-env" else ["--local-rank-spelling", spelling]
    script = str(REPOSITORY / "examples/launch_style.py")
    command = [sys.executable, "-m", "phalanx.launch", "--nproc_per_node=2", *flags, script]
    got = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert got.returncode == 0, got.stderr
    assert "[rank 0] replicas equal: True" in got.stdout


@pytest.mark.parametrize(
    ("text", "expected"), [("'--local_rank'", "--local_rank=1"), ("'--local-rank'", "--local-rank=1")]
)
def test_the_spelling_follows_the_script(text: str, expected: str, script, tmp_path: Path) -> None:
    name = script(f"import sys; option = {text}; print(sys.argv[1])")
    command = [sys.executable, "-m", "phalanx.launch", "--nproc_per_node", "2", name]
    got = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert f"[rank 1] {expected}" in got.stdout.splitlines(), got.stderr


def test_prepare_once(phalanx: Runner, tmp_path: Path) -> None:
    outcome = phalanx(
        "run", "--nproc-per-node", "3", str(REPOSITORY / "examples/prepare_once.py"), "--data", str(tmp_path / "d")
    )
    assert outcome.code == 0, outcome.err
    printed = by_rank(outcome)
    assert "rank 0 prepares" in printed[0][0]
    assert all("finds it prepared" in printed[rank][0] for rank in (1, 2))
    assert len({lines[-1].split()[-1] for lines in printed.values()}) == 1, "one checksum on all ranks"
