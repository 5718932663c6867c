"""`phalanx bench checkpoint`: its table, and a small run of it for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import bench
from phalanx.bench import checkpoint
from phalanx.bench.jobs import Series
from phalanx.bench.rows import rows


def test_the_table_has_times_and_ratios() -> None:
    times = dict(zip(checkpoint.CONTENDERS, (10_000.0, 20_000.0, 50_000.0, 60_000.0, 90_000.0), strict=True))
    series = [
        Series(measure, 100 * 10**6, name, 2, 0, (time,) * 3)
        for measure in (checkpoint.HELD, checkpoint.DURABLE)
        for name, time in times.items()
    ]
    after = {"no save": 100_000.0, "px.Checkpointer": 105_000.0, "DCP async_save, process": 108_000.0}
    series += [Series(checkpoint.AFTER, 100 * 10**6, name, 2, 0, (time,) * 3) for name, time in after.items()]
    text = " ".join(checkpoint.tables(rows(series)).split())
    assert "## How long the loop is held up" in text
    row = "| 100 | 2 | 10.0 (10.0–10.0) | 20.0 (20.0–20.0) | 50.0 (50.0–50.0) | 60.0 (60.0–60.0) | 90.0 (90.0–90.0) |"
    assert text.count(row + " 2.00 (2.00–2.00) | 5.00 (5.00–5.00) | 6.00 (6.00–6.00) | 9.00 (9.00–9.00) |") == 2
    assert "| 100 | 2 | 100.0 (100.0–100.0) | 5.0 (5.0–5.0) | 8.0 (8.0–8.0) | |" in text


def test_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ranks", "2", "--repeats", "1", "--rounds", "1", "--megabytes", "2", "--steps", "2"]
    assert bench.main(["checkpoint", *flags, "--out", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("checkpoint-*.md")
    assert page.read_text().count("| 2         | 2     |") == 3
    assert "bench: 1/1 2 MB, 2 ranks, repeat 1 of 1: 14 turns" in capsys.readouterr().err
