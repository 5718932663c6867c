"""The benchmark of samplers: its arithmetic, and once with small numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.bench import machine, sampler, sampler_probe
from phalanx.bench.sampler_table import OURS, TORCH, TORCHDATA, Sample, goal, ratio, shown, tables
from phalanx.bench.summary import Summary
from phalanx.errors import UsageError
from tests.conftest import Runner


def test_ratios_are_taken_within_a_repeat() -> None:
    samples = []
    for repeat, slow in enumerate((1, 64, 1)):
        samples.append(Sample("epoch", OURS, 1000, 8, repeat, 60.0 / slow))
        samples.append(Sample("epoch", TORCH, 1000, 8, repeat, 10.0 / slow))
        samples.append(Sample("epoch", TORCH, 1000, 1, repeat, 1.0))
    assert ratio(samples, OURS, 8) == Summary(6, 6, 6)
    assert ratio(samples, OURS, 1) is None


def test_goals() -> None:
    assert goal(OURS, 8, Summary(6, 1, 9)) == "≥ 5: met"
    assert goal(OURS, 1, Summary(0.9, 0.9, 9)) == "≥ 1: missed"
    assert goal(OURS, 1, None) == "≥ 1: not measured"
    assert goal(TORCH, 1, Summary(1, 1, 1)) == goal(OURS, 3, Summary(1, 1, 1)) == ""


def test_tables() -> None:
    samples = [
        Sample("first", OURS, 10**9, 1, 0, 0.0005),
        Sample("memory", OURS, 10**9, 1, 0, 2e6),
        Sample("traced", OURS, 10**9, 1, 0, 0.25e6),
        Sample("first", TORCH, 10**9, 1, 0, None, "left out: its list would take 56 GB"),
    ]
    text = tables(samples)
    assert "| 1e9     | ShardSampler       | 0.50 (0.50–0.50)" in text
    assert "≤ 1 ms: met; ≤ 1 MB: missed" in text
    assert "left out: its list would take 56 GB" in text
    assert "A whole epoch" not in text


def test_lengths() -> None:
    assert sampler.lengths("1e6,20,1e3") == (20, 1000, 10**6)
    assert [shown(length) for length in (10**6, 25_000_000, 1000, 1234)] == ["1e6", "25e6", "1000", "1234"]
    for wrong in ("x", "1e", "0", "1e-3", ""):
        with pytest.raises(UsageError):
            sampler.parse(["--lengths", wrong])


def test_a_small_run(phalanx: Runner, tmp_path: Path) -> None:
    """The others are left out: each would import torch once more. The next test measures them here."""
    flags = "--lengths 5000 --epoch-lengths 20000 --ranks 2 --longest-list 100 --repeats 1 --out found".split()
    outcome = phalanx("bench", "sampler", *flags)
    assert outcome.code == 0, outcome.err
    assert "left out: its list would take 0 GB" in outcome.out
    (found,) = (tmp_path / "found").glob("sampler-*.json")
    samples = json.loads(found.read_text())["samples"]
    figures = {sample["measure"]: sample["value"] for sample in samples if sample["contender"] == OURS}
    assert figures.keys() == {"epoch", "first", "memory", "traced"}
    assert all(value > 0 for measure, value in figures.items() if measure != "memory")
    others = {sample["contender"]: sample["value"] for sample in samples if sample["contender"] != OURS}
    assert others == dict.fromkeys([TORCH, TORCHDATA] if machine.installed("torchdata") else [TORCH])
    assert found.with_suffix(".md").exists()


@pytest.mark.filterwarnings("ignore")  # what torchdata's import says is not ours
@pytest.mark.parametrize("contender", [TORCH, TORCHDATA])
def test_the_others_are_measured(contender: str, tmp_path: Path) -> None:
    if contender == TORCHDATA and not machine.installed("torchdata"):
        pytest.skip("needs torchdata")
    sampler_probe.main(tmp_path, "first", contender, 5000, 2)
    assert json.loads((tmp_path / "notes.json").read_text()).keys() == {"first", "memory"}
    sampler_probe.main(tmp_path, "epoch", contender, 5000, 2)
    assert json.loads((tmp_path / "notes.json").read_text())["epoch"] > 0
