"""The benchmark of DP beside DDP: its tables, and once for real, with small numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.bench import dp_vs_ddp
from phalanx.bench.dp_vs_ddp_table import ALL, DDP, DDP_GLOO, DP, DP_SHARED, ONE, PARTS, tables
from phalanx.bench.jobs import Series
from phalanx.errors import UsageError
from tests.conftest import Runner


def test_the_tables() -> None:
    times = {ONE: 20, ALL: 12, DP: 30, DP_SHARED: 24, DDP: 10, DDP_GLOO: 16}
    series = [
        Series("MLP", 2**20, contender, 2, repeat, (time * 1e3 * (1 + repeat),))
        for repeat in range(2)
        for contender, time in times.items()
    ]
    series += [Series("MLP: one thread", 0, part, 1, 0, (2000.0,)) for part in ("forward", "backward")]
    text = tables(series, 2)
    assert "| MLP   | 1.0 " in text
    # The faster DP over DDP, one thread over each: the same in a slow repeat.
    assert "| 2.40 (2.40–2.40) | 2.00 (2.00–2.00) | 0.83 (0.83–0.83) |" in text
    assert "| 2.00 (2.00–2.00) |               | 4.00         |" in text


def test_flags() -> None:
    assert dp_vs_ddp.parse(["--replicas", "3", "--batch", "9"]).replicas == 3
    for wrong in (["--replicas", "3"], ["--replicas", "1"], ["--width", "0"], ["--models", "GPT"]):
        with pytest.raises(UsageError):
            dp_vs_ddp.parse(wrong)


def test_for_real(phalanx: Runner, tmp_path: Path) -> None:
    flags = ["--models", "MLP", "--width", "16", "--batch", "4", "--seconds", "0.01", "--repeats", "1"]
    got = phalanx("bench", "dp-vs-ddp", *flags, "--out", str(tmp_path / "out"))
    assert got.code == 0, got.err
    assert "## Where DP's time goes" in got.out
    (path,) = (tmp_path / "out").glob("dp-vs-ddp-*.json")
    samples = json.loads(path.read_text())["samples"]
    steps = {sample["contender"] for sample in samples if sample["ranks"] == 2}
    assert steps == {ONE, ALL, DP, DP_SHARED, DDP, DDP_GLOO}
    assert {sample["contender"] for sample in samples if sample["ranks"] == 1} == set(PARTS)
    assert all(time > 0 for sample in samples for time in sample["microseconds"])
