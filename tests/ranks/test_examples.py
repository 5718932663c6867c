"""What the examples have to print. Those of communication are compared with what the collective means.

Commands that the documentation shows are run by tests/ranks/test_commands.py, which looks here for what they must
print (EXPECTED); everything else runs as the main module of ranks that are there already, which is quicker.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY, WITHOUT_TORCH, Outcome, by_rank, free_port, start

COMM = REPOSITORY / "examples" / "comm"
RANKS = 4
RunRanks = Callable[..., list[Any]]


def perform(rank: int, example: str, arguments: tuple[str, ...], variables: dict[str, str]) -> str:
    """What a rank prints whose main module is the example; with what it says when it exits."""
    os.environ.update(variables)
    sys.argv = [example, *(word.replace("RANK", str(rank)) for word in arguments)]
    sys.path.insert(0, str(Path(example).parent))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(example, run_name="__main__")
        except SystemExit as end:
            print(end)
    return printed.getvalue()


def performed(run_ranks: RunRanks, ranks: int, example: str, *arguments: str, **variables: str) -> list[str]:
    path = str(REPOSITORY / "examples" / example)
    return run_ranks(perform, ranks, path, arguments, variables, join_group=False)


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


def check_meaning(name: str, printed: dict[int, list[str]]) -> None:
    """``before  rank 1: [1, 1]`` of every rank, sorted by moment."""
    assert sorted(printed) == list(range(RANKS)), "every rank shows what it holds"
    moments: dict[str, Held] = {}
    for rank, lines in printed.items():
        for line in lines:
            moment, number, text = re.fullmatch(r"(.*?) +rank (\d): (.*)", line).groups()  # type: ignore[union-attr]
            assert int(number) == rank
            try:
                value = ast.literal_eval(text)
            except (SyntaxError, ValueError):
                value = text
            moments.setdefault(moment, [None] * RANKS)[rank] = value
    for after, before, meaning in MEANING[name]:
        assert moments[after] == meaning(moments[before]), after


@pytest.mark.parametrize("name", sorted(MEANING))
def test_an_example_of_communication(name: str, run_ranks: RunRanks) -> None:
    printed = performed(run_ranks, RANKS, f"comm/{name}.py")
    check_meaning(name, {rank: text.splitlines() for rank, text in enumerate(printed)})


# ---- what shown commands must print


def reference(outcome: Outcome) -> None:
    """M13: on 4 ranks each epoch prints, for every rank, 32 steps (32 × 32 × 4 = 4096)."""
    found = re.findall(r"Rank (\d) \| Epoch (\d) \| Batchsize 32 \| Steps 32\n", outcome.out)
    assert sorted((int(epoch), int(rank)) for rank, epoch in found) == [(e, r) for e in range(2) for r in range(4)]
    first, second = (float(loss) for loss in re.findall(r"loss ([\d.]+)", outcome.out))
    assert second < first


def digits(outcome: Outcome) -> None:
    receipt = outcome.out.partition("receipt for 2 ranks")[2]
    assert "11520 of 11520 seen (8 epochs of 1440), 0 twice" in receipt
    assert re.search(r"replicas   equal, checksum [0-9a-f]{12}\n", receipt)
    accuracy = re.search(r"accuracy   ([\d.]+)% of 357 test samples", receipt)
    assert accuracy is not None
    assert float(accuracy[1]) > 97
    off = re.search(r"its weights are (\S+) away at most", receipt)
    assert off is not None
    assert float(off[1]) < 1e-2  # AdamW: rounding grows with the steps


def gpt(outcome: Outcome) -> None:
    loss = re.search(r"40 steps, loss of the last batch ([\d.]+)", outcome.out)
    assert loss is not None
    assert 1 < float(loss[1]) < 4.2  # about 4.55 for 95 characters before the first step


def launch_style(outcome: Outcome) -> None:
    assert "[rank 0] replicas equal: True" in outcome.lines


def prepare_once(outcome: Outcome) -> None:
    printed = by_rank(outcome)
    assert "rank 0 prepares" in printed[0][0]
    assert all("finds it prepared" in printed[rank][0] for rank in (1, 2))
    assert len({lines[-1].split()[-1] for lines in printed.values()}) == 1, "one checksum on all ranks"


def the_readmes_script_alone(outcome: Outcome) -> None:
    alone = re.fullmatch(r"1 ranks, loss (0\.\d+)\n", outcome.out)
    assert alone is not None
    assert float(alone[1]) < 0.01


def the_readmes_script(outcome: Outcome) -> None:
    assert len(re.findall(r"\[rank 0\] 4 ranks, loss (0\.\d+)\n", outcome.out)) == 1


EXPECTED: dict[str, Callable[[Outcome], None]] = {
    "phalanx run --nproc-per-node 4 examples/reference.py": reference,
    "python examples/reference.py --spawn 4": reference,
    "phalanx run --nproc-per-node 2 examples/digits.py": digits,
    "phalanx run --nproc-per-node 2 examples/gpt.py --steps 40 --width 32 --layers 1 --context 32": gpt,
    "phalanx run --nproc-per-node 4 examples/launch_style.py": launch_style,
    "python -m phalanx.launch --nproc_per_node=4 examples/launch_style.py": launch_style,
    "phalanx run --nproc-per-node 3 examples/prepare_once.py --data prepared": prepare_once,
    "python train.py": the_readmes_script_alone,
    "phalanx run --nproc-per-node 4 train.py": the_readmes_script,
    **{
        f"phalanx run --nproc-per-node 4 examples/comm/{name}.py": lambda outcome, name=name: check_meaning(
            name, by_rank(outcome)
        )
        for name in ("all_reduce", "subgroups")
    },
}


# ---- the rest of what examples do


def test_the_reference_alone(run_ranks: RunRanks) -> None:
    (printed,) = performed(run_ranks, 1, "reference.py", "--max_epochs", "1", "--batch_size", "64")
    assert printed.startswith("Rank 0 | Epoch 0 | Batchsize 64 | Steps 64\nloss ")


def test_digits_says_what_batch_it_needs(run_ranks: RunRanks) -> None:
    told = performed(run_ranks, 2, "digits.py", "--batch-size", "7")
    assert told == ["--batch-size 7 cannot be divided by 2 ranks.\n"] * 2


def test_launch_style_takes_the_newer_spelling(run_ranks: RunRanks) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    printed = performed(run_ranks, 2, "launch_style.py", "--epochs", "1", "--local-rank=RANK", **variables)
    assert "replicas equal: True\n" in printed[0]


def write_idx(path: Path, values: torch.Tensor) -> None:
    import gzip
    import struct

    data = struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape) + bytes(values.flatten().tolist())
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_mnist_from_its_files(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A small file of each kind: the label is where the bright row is, so a network can learn it."""
    generator = torch.Generator().manual_seed(0)
    for part, count, end in (("train", 400, ".gz"), ("t10k", 101, "")):
        labels = torch.randint(0, 10, (count,), generator=generator)
        images = torch.randint(0, 60, (count, 28, 28), generator=generator)
        for image, label in zip(images, labels.tolist(), strict=True):
            image[2 * label + 4 : 2 * label + 6] = 255
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{end}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{end}", labels)
    flags = ["--data", str(tmp_path), "--epochs", "4", "--batch-size", "16"]
    printed, _ = performed(run_ranks, 2, "mnist.py", *flags)
    accuracies = [float(found) for found in re.findall(r"epoch \d: accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 4
    assert accuracies[-1] > 90
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    (told,) = performed(run_ranks, 1, "mnist.py", "--data", str(tmp_path))
    assert "has neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz" in told


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("--local_rank", [], "['--local_rank=1']"),
        ("--local-rank", [], "['--local-rank=1']"),
        ("--local_rank", ["--local-rank-spelling", "local-rank"], "['--local-rank=1']"),
        ("--local-rank", ["--local-rank-spelling", "local_rank"], "['--local_rank=1']"),
        ("--local_rank", ["--use_env"], "[]"),
    ],
    ids=["underscore", "dash", "forced dash", "forced underscore", "use-env"],
)
def test_the_spelling_follows_the_script(text: str, flags: list[str], expected: str, script, tmp_path: Path) -> None:
    name = script(f"import os, sys; option = {text!r}; print(os.environ['LOCAL_RANK'], sys.argv[1:])")
    command = ["-m", "phalanx.launch", *WITHOUT_TORCH, "--nproc_per_node", "2", *flags, name]
    out, err = start(*command, cwd=tmp_path).communicate(timeout=60)
    assert f"[rank 1] 1 {expected}" in out.splitlines(), err
