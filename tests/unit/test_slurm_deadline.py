"""The end of a SLURM job, and its way back into the queue, by what `scontrol` of SLURM 22.05 prints."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from phalanx.preemption.deadline import Deadline, requeue

SHOWN = "JobId=7 JobName=job.sh {} Dependency=(null) Requeue=1 Restarts={} BatchFlag=1 ExitCode=0:0 EndTime={} Power="


class Scontrol:
    """A program of that name, first on PATH."""

    def __init__(self, place: Path) -> None:
        self.shown, self._calls = place / "shown", place / "calls"
        program = place / "scontrol"
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {self._calls}\n[ "$1" = requeue ] || cat {self.shown}\n[ ! -e {place}/fails ]\n'
        )
        program.chmod(0o755)

    def show(self, state: str, restarts: int = 0, end: float = 0.0) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end)) if end else "Unknown"
        self.shown.write_text(SHOWN.format(state, restarts, at))

    def calls(self) -> list[str]:
        """The calls since the last question."""
        found = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.write_text("")
        return found


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Scontrol(tmp_path)


@pytest.mark.parametrize(
    ("state", "restarts", "before", "is_called", "text"),
    [
        ("JobState=RUNNING Reason=None", 0, 0, True, "job 7 is back in SLURM's queue"),
        ("JobState=COMPLETING Reason=TimeLimit", 0, 0, True, "job 7 is back in SLURM's queue"),
        ("JobState=COMPLETING Reason=None", 3, 2, False, "job 7 is back in SLURM's queue"),
        ("JobState=COMPLETING Reason=None", 2, 2, False, "job 7 was cancelled, so it is not put back into"),
    ],
)
def test_requeue(state: str, restarts: int, before: int, is_called: bool, text: str, scontrol: Scontrol) -> None:
    """Not what scancel ends, and not twice."""
    scontrol.show(state, restarts)
    assert requeue("7", before).startswith(text)
    assert ("requeue 7" in scontrol.calls()) == is_called


def test_a_requeue_that_fails(scontrol: Scontrol, tmp_path: Path) -> None:
    scontrol.show("JobState=RUNNING Reason=None")
    (tmp_path / "fails").touch()
    assert requeue("7", 0) == "job 7 could not be put back into the queue: `scontrol requeue 7` failed"


def test_the_end_of_a_job(scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of SLURM 22.05 has it. SLURM is asked again before the stop begins, and every few minutes."""
    now = time.time()
    scontrol.show("JobState=RUNNING Reason=None", end=now + 100)
    deadline = Deadline(None, {"SLURM_JOB_ID": "7"})
    assert not deadline.is_due(20)
    assert scontrol.calls() == ["-o show job 7"]
    assert not deadline.is_due(20)
    assert scontrol.calls() == []
    assert deadline.is_due(25), "three times a save, and half a minute"
    scontrol.show("JobState=RUNNING Reason=None", end=now + 1000)
    assert not deadline.is_due(25), "an administrator has given it more time"
    scontrol.show("JobState=RUNNING Reason=None", end=now + 20)
    later = time.monotonic() + 301
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert deadline.is_due(0), "or less"
    assert deadline.describe() in ("the end of the SLURM job is 19 s away", "the end of the SLURM job is 20 s away")


def test_a_job_without_an_end(scontrol: Scontrol) -> None:
    scontrol.show("JobState=RUNNING Reason=None")
    assert not Deadline(None, {"SLURM_JOB_ID": "7"}).is_due(1000)
