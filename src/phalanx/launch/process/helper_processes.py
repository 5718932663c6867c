"""The zygote and the keeper as processes: waiting for them, continuing stopped ones, ending what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping

from phalanx.errors import LaunchError
from phalanx.system import procfs

KILL_SECONDS = 3.0
_STOPPED_SECONDS = 2.0
"""Seconds that a helper may be stopped while nothing is wanted of it."""


class HelperLost(LaunchError):
    """The zygote or the keeper has ended or does not answer: the attempt is lost, but another one can be made."""


def how_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def describe_end(zygote: subprocess.Popen[bytes]) -> str:
    """Returns how the zygote has ended, now that it does not answer."""
    name = f"the process that starts the workers (pid {zygote.pid})"
    try:
        return f"{name} was {how_ended(zygote.wait(KILL_SECONDS))}; all workers are ended"
    except subprocess.TimeoutExpired:
        return f"{name} does not answer; all workers are ended"


def has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits for the end of a process; returns whether it came within this time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def wait(is_there: Callable[[float], object], seconds: float, name: str, resume: Callable[..., object]) -> None:
    """Waits until ``is_there``, which waits for so many seconds itself; raises HelperLost after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not is_there(min(0.5, max(0.0, deadline - time.monotonic()))):
        resume(at_once=True)
        if time.monotonic() >= deadline:
            raise HelperLost(f"{name} has not answered for {seconds:g} s")


class StoppedHelpers:
    """Continues helpers that somebody has stopped. Ranks may be stopped on purpose; a run cannot end without these."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def resume(self, names: Mapping[int, str], *, at_once: bool) -> list[str]:
        """Continues the stopped ones, after a while or ``at_once``; returns a sentence for each.

        ``names``: what each process does, by pid.
        """
        now = time.monotonic()
        is_stopped = {pid for pid in names if (found := procfs.stat(pid)) is not None and found.state == "T"}
        self._since = {pid: self._since.get(pid, now) for pid in is_stopped}
        due = [pid for pid, since in self._since.items() if at_once or now - since >= _STOPPED_SECONDS]
        for pid in due:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)
        return [f"the process that {names[pid]} (pid {pid}) was stopped; it is resumed" for pid in due]


def end_with(
    zygote: subprocess.Popen[bytes], token: str, spared: Collection[int], workers: Collection[int]
) -> set[int]:
    """Kills the zygote and all processes of the run but ``spared``; returns those that even SIGKILL has not ended.

    ``workers``: those that it has started, for the shared memory that they may have left.
    """
    from phalanx.launch.process import process_tree  # only needed when something has gone wrong

    below = procfs.descendants(zygote.pid) if zygote.poll() is None else set()
    zygote.kill()

    def find() -> set[int]:
        zygote.poll()
        return (procfs.living(below) | process_tree.processes_of_run(token)) - set(spared)

    left = process_tree.end_all(find, KILL_SECONDS)
    process_tree.remove_segments(workers)
    return left


def describe_left(left: Collection[int], ranks: Mapping[int, int]) -> list[str]:
    """Returns a sentence for each process that even SIGKILL has not ended. ``ranks``: by pid."""
    return [
        f"{f'rank {ranks[pid]}' if pid in ranks else 'a process of this run'} cannot be ended, not even by SIGKILL: "
        f"{procfs.describe(pid)}; it is left behind"
        for pid in sorted(left)
    ]
