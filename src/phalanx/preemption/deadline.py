"""The end of a run that is known in advance: `--time-limit`, or the end of its SLURM job."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Mapping

_SCONTROL_SECONDS = 5.0
_SAVES = 3.0
"""The stop begins so many times the longest save before the end, and `_MARGIN` earlier."""
_MARGIN = 30.0
_ASK_EVERY = 300.0
"""Seconds between two questions to SLURM: an administrator may give a job more time, or less."""


class Deadline:
    """When the ranks of a run have to stop, so that they can save before its end."""

    def __init__(self, time_limit: float | None, environ: Mapping[str, str]) -> None:
        self.is_ours = time_limit is not None
        """The limit was given to phalanx; SLURM ends a job by itself."""
        self.name = "the time limit" if self.is_ours else "the end of the SLURM job"
        self._job = environ.get("SLURM_JOB_ID") if time_limit is None else None
        self._end = time.time() + time_limit if time_limit is not None else math.inf
        self._earliest = self._end - time_limit / 2 if time_limit is not None else 0.0
        """A short limit leaves half of itself to the training."""
        self._ask_at = 0.0

    def is_due(self, longest_save: float) -> bool:
        """Whether the stop has to begin now. ``longest_save``: seconds that a save of this run has taken."""
        early = min(_SAVES * longest_save + _MARGIN, self._end - self._earliest)
        if self._job is not None and (time.time() >= self._end - early or time.monotonic() >= self._ask_at):
            self._ask_at = time.monotonic() + _ASK_EVERY
            self._end = job_end(self._job) or self._end
        return time.time() >= self._end - early

    @property
    def left(self) -> float:
        """Seconds to the end."""
        return max(0.0, self._end - time.time())

    def describe(self) -> str:
        return f"{self.name} is {self.left:.0f} s away"


def job_end(job: str) -> float | None:
    """Returns when SLURM ends a job, in seconds since the epoch; None if it is not known."""
    found = re.search(r" EndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", _scontrol("-o", "show", "job", job) or "")
    return time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) if found else None


def requeue(job: str, restarts: int) -> str:
    """Puts a SLURM job back into the queue unless scancel ends it; returns the sentence for the console.

    ``restarts``: how often the job was started again before this time.
    """
    shown = _scontrol("-o", "show", "job", job) or ""
    found = re.search(r" Restarts=(\d+)", shown)
    is_back = found is not None and int(found[1]) > restarts  # by SLURM itself, after a preemption
    if not is_back and " JobState=COMPLETING Reason=None " in shown:
        return f"job {job} was cancelled, so it is not put back into SLURM's queue"
    if not is_back and _scontrol("requeue", job) is None:
        return f"job {job} could not be put back into the queue: `scontrol requeue {job}` failed"
    return f"job {job} is back in SLURM's queue"


def _scontrol(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=True,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
