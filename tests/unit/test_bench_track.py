"""`phalanx bench track`: its table, and a small run of it for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import bench
from phalanx.bench import track
from phalanx.bench.jobs import Series
from phalanx.bench.rows import rows


def series(contender: str, measure: str, times: tuple[float, ...]) -> Series:
    return Series(measure, 0, contender, 2, 0, times)


@pytest.mark.parametrize(
    ("tracked", "words"), [(500_000.0 + 2_000, "0.40% | ≤ 1 %: met"), (507_000.0, "1.40% | ≤ 1 %: missed")]
)
def test_the_cost_of_a_step_is_what_both_epochs_differ_by(tracked: float, words: str) -> None:
    settings = track.parse(["--steps", "100"])
    found = rows([series("bare", "work", (500_000.0,) * 3), series("tracked", "work", (tracked,) * 3)])
    text = " ".join(track.table(found, settings).split())
    assert f"| 2 | 5 | 5000.0 (5000.0–5000.0) | {tracked / 100:.1f}" in text
    assert words in text


def test_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ranks", "2", "--repeats", "1", "--steps", "5", "--seconds", "0.4", "--milliseconds", "1"]
    assert bench.main(["track", *flags, "--out", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("track-*.md")
    assert "| 2     | 1" in page.read_text()
    assert "bench: 1/1 track, 2 ranks, repeat 1 of 1" in capsys.readouterr().err
