"""`phalanx bench recovery`: its arithmetic, its checks, its tables, and a small run of it for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx import bench
from phalanx.bench import recovery, recovery_notes
from phalanx.bench.recovery_notes import PHASES, Plan, Recovery
from phalanx.bench.recovery_table import tables
from phalanx.errors import UsageError

PLAN = Plan(ranks=2, width=8, steps=4, every=2, killed_after=3)
REFERENCE = {1: 8.0, 2: 4.0, 3: 2.0, 4: 1.0}


def note(time: float, event: str, rank: int = 0, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": event, "rank": rank, "attempt": attempt, **fields}


def notes() -> list[dict[str, Any]]:
    """Of a run that was killed after step 3 and did what it should; every phase has another length."""
    first = [note(step, "step", attempt=0, step=step, loss=REFERENCE[step]) for step in (1, 2, 3)]
    times = {"begun": 17.0, "joined": 21.0, "built": 26.0, "loaded": 32.0}
    second = [note(time - rank / 2, event, rank, step=2) for rank in (0, 1) for event, time in times.items()]
    steps = [note(time, "step", step=step, loss=REFERENCE[step]) for step, time in ((3, 39.0), (4, 40.0))]
    return [*first, note(11.0, "killed", rank=1, attempt=0), *second, *steps]


AGENT = [{"time": time, "event": event} for time, event in ((12.0, "exited"), (13.5, "exited"), (14.0, "restarting"))]


def test_the_phases_follow_one_another_from_the_kill_to_the_step() -> None:
    found = recovery_notes.phases(notes(), AGENT)
    assert found == dict(zip(PHASES, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), strict=True))
    without = recovery_notes.phases(notes(), [])
    assert without == {"begin": 6.0, "join": 4.0, "build": 5.0, "load": 6.0, "step": 7.0}
    assert sum(found.values()) == sum(without.values()) == 39.0 - 11.0
    failed = [each for each in notes() if each["attempt"] == 0 or each["event"] in ("begun", "joined")]
    assert recovery_notes.phases(failed, []) == {"begin": 6.0, "join": 4.0}


def test_only_a_run_that_went_on_rightly_counts() -> None:
    def problem(found: list[dict[str, Any]]) -> str:
        return recovery_notes.problem(found, PLAN, REFERENCE)

    def changed(what: str, attempt: int, **fields: Any) -> list[dict[str, Any]]:
        """In all such notes of rank 0."""
        return [
            {**each, **fields} if (each["event"], each["attempt"], each["rank"]) == (what, attempt, 0) else each
            for each in notes()
        ]

    assert problem(notes()) == ""
    assert problem([each for each in notes() if each["event"] != "killed"]) == "had 0 ranks killed instead of 1"
    assert problem(changed("loaded", 1, step=0)).startswith("went on from the steps [0, 2], and 2 ranks")
    assert problem(changed("loaded", 1, event="lost")).startswith("went on from the steps [2], and 2 ranks")
    assert problem(changed("step", 1, loss=1.01)) == "has the loss 1.01 at step 3 of attempt 1, not 2"
    assert problem(changed("step", 0, loss=8.0)) == "has the loss 8 at step 2 of attempt 0, not 4"
    assert problem(changed("step", 1, step=4)) == "has not taken the steps [3] in attempt 1"
    # Rank 0 may have lost its peer within the step after which that one was killed.
    assert problem([each for each in notes() if (each["event"], each["time"]) != ("step", 3)]) == ""


@pytest.mark.parametrize(("seconds", "verdict"), [(1.0, "met"), (1.5, "missed")])
def test_the_tables(seconds: float, verdict: str) -> None:
    samples = []
    for repeat, torchrun in enumerate((4.0, 5.0, None)):
        samples.append(Recovery("recovery", "phalanx", 4, repeat, seconds, "", {"notice": 0.01, "begin": seconds}))
        samples.append(
            Recovery("recovery", "torchrun", 4, repeat, None, "fails: ended with exit code 1", {"begin": 3.0})
        )
        if torchrun:  # it was tried again
            samples.append(Recovery("recovery", "torchrun", 4, repeat, torchrun, "", {"begin": torchrun}))
    text = " ".join(tables(samples).split())
    ratios = sorted((seconds / 4, seconds / 5))
    ratio = f"{sum(ratios) / 2:.2f} ({ratios[0]:.2f}–{ratios[1]:.2f})"
    assert f"| 4 | phalanx | {seconds:.2f} ({seconds:.2f}–{seconds:.2f}) | {ratio} | ≤ 0.25: {verdict} |" in text
    assert "| torchrun | 4.50 (4.00–5.00); fails: ended with exit code 1 (3 of 5) | 1.00 (1.00–1.00) |" in text
    assert f"| 4 | phalanx | 10 | | {seconds * 1000:.0f} | | | | |" in text
    assert "| 4 | torchrun | | | 3000 | | | | |" in text


def test_flags() -> None:
    assert recovery.parse(["--contenders", "torchrun,phalanx"]).contenders == ("torchrun", "phalanx")
    for wrong in (["--ranks", "1,2"], ["--contenders", "phalanx,slurm"], ["--tries", "0"], ["--width", "x"]):
        with pytest.raises(UsageError, match=wrong[0]):
            recovery.parse(wrong)


def test_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both scripts; under phalanx, for torchrun's restarts fail or hang as it happens."""
    both = ("phalanx", "phalanx-torch-save")
    flags = ["--ranks", "2", "--repeats", "1", "--width", "64", "--contenders", ",".join(both)]
    assert bench.main(["recovery", *flags, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("recovery-*.json")
    samples = json.loads(path.read_text())["samples"]
    assert [sample["contender"] for sample in samples] == list(both)
    for sample in samples:
        assert tuple(sample["phases"]) == PHASES
        assert all(seconds > 0 for seconds in sample["phases"].values())
        assert sample["value"] == pytest.approx(sum(sample["phases"].values()))
    (page,) = tmp_path.glob("recovery-*.md")
    assert "≤ 0.25: not measured" in page.read_text()
    assert "bench: 1/3 uninterrupted, on the samples of 2 ranks: 30 steps" in capsys.readouterr().err
