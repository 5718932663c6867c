"""`phalanx bench recorder`: its table, and a small run of it for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import bench
from phalanx.bench import recorder
from phalanx.bench.jobs import Series
from phalanx.bench.rows import rows


def line(measure: str, without: float, recorded: float) -> str:
    return line_of(measure, (without,) * 3, (recorded,) * 3)


def line_of(measure: str, without: tuple[float, ...], recorded: tuple[float, ...]) -> str:
    series = [Series(measure, 0, "without", 2, 0, without), Series(measure, 0, "with", 2, 0, recorded)]
    return " ".join(recorder.table(rows(series)).splitlines()[-1].split())


def test_the_cost_is_what_both_differ_by() -> None:
    assert line("all_reduce of 4 B, shm", 10.0, 11.5).endswith("| 1.50 (1.50–1.50) | 15.00% | ≤ 2 µs: met |")
    assert line("all_reduce of 4 B, shm", 10.0, 12.5).endswith("≤ 2 µs: missed |")
    assert line("DDP step, gloo", 2000.0, 2010.0).endswith("| 10.00 (10.00–10.00) | 0.50% | ≤ 1%: met |")
    assert line("DDP step, gloo", 2000.0, 2030.0).endswith("| 1.50% | ≤ 1%: missed |")


def test_turns_are_compared_with_the_ones_beside_them() -> None:
    """While the machine becomes slower; the medians are equal."""
    assert "| 1.00 (1.00–1.00) |" in line_of("all_reduce of 4 B, shm", (10.0, 20.0, 30.0), (11.0, 31.0, 20.0))


def test_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ranks", "2", "--repeats", "1", "--calls", "5", "--widths", "16", "--seconds", "0.1"]
    assert bench.main(["recorder", *flags, "--out", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("recorder-*.md")
    text = page.read_text()
    lines = [
        f"| 2     | {what}, {by}" for what in ("all_reduce of 4 B", "DDP step, width 16") for by in ("shm", "gloo")
    ]
    assert all(line in text for line in lines)
    assert "bench: 1/1 recorder, 2 ranks, repeat 1 of 1" in capsys.readouterr().err
