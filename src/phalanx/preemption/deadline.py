"""The end of a run that is known in advance: `--time-limit`, or the end of its SLURM job."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping

_SCONTROL_SECONDS = 5.0
_SAVES = 3.0
"""The stop begins so many times the longest save before the end, and `_MARGIN` earlier."""
_MARGIN = 30.0


class Deadline:
    """When the ranks of a run have to stop, so that they can save before its end."""

    def __init__(self, time_limit: float | None, environ: Mapping[str, str]) -> None:
        self.is_ours = time_limit is not None
        """The limit was given to phalanx; SLURM ends a job by itself."""
        self._job = environ.get("SLURM_JOB_ID") if time_limit is None else None
        end = environ.get("SLURM_JOB_END_TIME", "") if self._job else ""
        self._end: float | None = time.time() + time_limit if time_limit is not None else None
        if end.isdigit() and int(end) > time.time():
            self._end = float(end)

    def is_due(self, longest_save: float) -> bool:
        """Whether the stop has to begin now. ``longest_save``: seconds that a save of this run has taken."""
        early = _SAVES * longest_save + (0.0 if self.is_ours and not longest_save else _MARGIN)
        if self._end is None or time.time() < self._end - early:
            return False
        if self._job is not None:  # an administrator may have given the job more time
            self._end = job_end(self._job)
            return self._end is not None and time.time() >= self._end - early
        return True

    def describe(self) -> str:
        left = max(0.0, (self._end or 0.0) - time.time())
        what = "the time limit" if self.is_ours else "the end of the SLURM job"
        return f"{what} is {left:.0f} s away"


def job_end(job: str) -> float | None:
    """Returns when SLURM ends a job, in seconds since the epoch; None if it is not known."""
    found = re.search(r" EndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", _scontrol("-o", "show", "job", job) or "")
    return time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) if found else None


def requeue(job: str) -> str:
    """Puts a SLURM job back into the queue, and returns the sentence for the console."""
    if _scontrol("requeue", job) is None:
        return f"job {job} could not be put back into the queue: `scontrol requeue {job}` failed"
    return f"job {job} is back in SLURM's queue"


def _scontrol(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
