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
import torch

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
    found = re.findall(r"Rank (\d) \| Epoch (\d) \| Batchsize 32 \| Steps 32\n", got.stdout)
    assert sorted((int(epoch), int(rank)) for rank, epoch in found) == [(e, r) for e in range(2) for r in range(4)]
    first, second = (float(loss) for loss in re.findall(r"loss ([\d.]+)", got.stdout))
    assert second < first


def test_the_reference_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "examples/reference.py"), "--max_epochs", "1", "--batch_size", "64"]
    got = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert got.stdout.startswith("Rank 0 | Epoch 0 | Batchsize 64 | Steps 64\nloss "), got.stderr


def test_digits_end_with_a_receipt(phalanx: Runner) -> None:
    outcome = phalanx("run", "--nproc-per-node", "2", str(REPOSITORY / "examples/digits.py"))
    assert outcome.code == 0, outcome.err
    receipt = outcome.out.partition("receipt for 2 ranks")[2]
    assert "11520 of 11520 seen (8 epochs of 1440), 0 twice" in receipt
    assert re.search(r"replicas   equal, checksum [0-9a-f]{12}\n", receipt)
    accuracy = re.search(r"accuracy   ([\d.]+)% of 357 test samples", receipt)
    assert accuracy is not None
    assert float(accuracy[1]) > 97
    off = re.search(r"its weights are (\S+) away at most", receipt)
    assert off is not None
    assert float(off[1]) < 1e-2  # AdamW: rounding grows with the steps


def test_digits_says_what_batch_it_needs(phalanx: Runner) -> None:
    outcome = phalanx("run", "--nproc-per-node", "2", str(REPOSITORY / "examples/digits.py"), "--batch-size", "7")
    assert outcome.code == 1
    assert "--batch-size 7 cannot be divided by 2 ranks" in outcome.err


def write_idx(path: Path, values: torch.Tensor) -> None:
    import gzip
    import struct

    data = struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape) + bytes(values.flatten().tolist())
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_mnist_from_its_files(phalanx: Runner, tmp_path: Path) -> None:
    """A small file of each kind: the label is where the bright row is, so a network can learn it."""
    generator = torch.Generator().manual_seed(0)
    for part, count, end in (("train", 400, ".gz"), ("t10k", 101, "")):
        labels = torch.randint(0, 10, (count,), generator=generator)
        images = torch.randint(0, 60, (count, 28, 28), generator=generator)
        for image, label in zip(images, labels.tolist(), strict=True):
            image[2 * label + 4 : 2 * label + 6] = 255
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{end}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{end}", labels)
    script = str(REPOSITORY / "examples/mnist.py")
    flags = ["--epochs", "4", "--batch-size", "16"]
    outcome = phalanx("run", "--nproc-per-node", "2", script, "--data", str(tmp_path), *flags)
    assert outcome.code == 0, outcome.err
    accuracies = [float(found) for found in re.findall(r"epoch \d: accuracy ([\d.]+)%", outcome.out)]
    assert len(accuracies) == 4
    assert accuracies[-1] > 90
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    outcome = phalanx("run", "--nproc-per-node", "1", script, "--data", str(tmp_path))
    assert "has neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz" in outcome.err


def test_gpt_learns(phalanx: Runner) -> None:
    small = ["--steps", "40", "--width", "32", "--layers", "1", "--context", "32"]
    outcome = phalanx("run", "--nproc-per-node", "2", str(REPOSITORY / "examples/gpt.py"), *small)
    assert outcome.code == 0, outcome.err
    loss = re.search(r"40 steps, loss of the last batch ([\d.]+)", outcome.out)
    assert loss is not None
    assert 1 < float(loss[1]) < 4.2  # about 4.55 for 95 characters before the first step


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
