"""The words for a finding: what a person reads at the end of a failed run. Never more than 15 lines."""

from __future__ import annotations

import os
import signal
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from phalanx.diagnose.findings import Verdict
from phalanx.events import Ending, Frame

_WIDTH = 160
_PACKAGE = str(Path(__file__).parents[1])
_SIGNALS = {
    "SIGKILL": "killed from outside: by the kernel when memory runs out, or by somebody's kill -9",
    "SIGSEGV": "native code touched memory that is not its own",
    "SIGBUS": "memory could not be provided, most often because /dev/shm is full",
    "SIGABRT": "native code gave up: a failed check or an uncaught C++ exception",
    "SIGFPE": "native code divided by zero or overflowed",
    "SIGILL": "native code used an instruction this processor does not have",
    "SIGTERM": "another process asked it to end",
    "SIGINT": "interrupted",
    "SIGHUP": "its terminal was closed",
    "SIGPIPE": "it wrote to a pipe that nobody reads",
    "SIGXCPU": "its limit of processor time was reached",
}


def failure_block(
    verdict: Verdict, *, world_size: int, host: str, started: float, log: str, attempts: int = 1
) -> list[str]:
    """The end of a failed run."""
    cause = verdict.cause
    lines = [_clip(f"rank {cause.rank} failed: {headline(cause)}")]
    where = [f"rank {cause.rank} of {world_size}", f"host {host}", f"pid {cause.pid}"]
    where.append(f"exit code {cause.status}" if cause.signal is None else f"signal {cause.signal}")
    where.append(f"{max(0.0, cause.time - started):.1f} s after the start")
    if attempts > 1:
        where.append(f"attempt {attempts}")
    lines.append("  " + ", ".join(where))
    lines += [_clip(f"  at {_place(frame)}") for frame in _telling_frames(cause)]
    if cause.tail:
        lines.append("  the last it printed:")
        lines += [_clip(f"    {line}") for line in cause.tail]
    if verdict.left_early:
        lines.append(f"  {_ranks(verdict.left_early)} ended normally meanwhile: did the ranks run different steps?")
    if verdict.victims:
        lines.append(f"  {_ranks(verdict.victims)} fell with it")
    lines.append(f"  {'traceback and ' if cause.error else ''}output: {log}")
    assert len(lines) <= 15, "the block must fit on a small screen"
    return lines


def headline(ending: Ending) -> str:
    """The reason in one line: the exception, the signal with its meaning, or the exit code."""
    error = ending.error
    if error is not None:
        if error.type == "SystemExit":
            return f"sys.exit({error.message})"
        message = error.message.strip().splitlines()
        return f"{error.type}: {message[0]}" if message else error.type
    if ending.signal is not None:
        try:
            name = signal.Signals(ending.signal).name
        except ValueError:
            name = f"signal {ending.signal}"
        return f"{name}, {_SIGNALS[name]}" if name in _SIGNALS else name
    return f"exit code {ending.exit_code}, without an exception"


def one_line(ending: Ending) -> str:
    """For the line that announces a restart."""
    frames = _telling_frames(ending)
    where = f" at {shorten_path(frames[-1].file)}:{frames[-1].line}" if frames else ""
    return _clip(f"rank {ending.rank} failed: {headline(ending)}{where}")


def _telling_frames(ending: Ending) -> list[Frame]:
    """The user's last lines, and the library's line where it happened if that is another one."""
    frames = list(ending.error.frames) if ending.error else list(reversed(ending.crash))
    users = [frame for frame in frames if not _is_library(frame.file)]
    telling = users[-3:]
    if frames and frames[-1] not in telling and not (users and frames[-1].file.startswith(_PACKAGE)):
        telling.append(frames[-1])
    return telling


def _is_library(file: str) -> bool:
    if file.startswith(("<", _PACKAGE)) or "site-packages" in file or "dist-packages" in file:
        return True
    return file.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")))


def _place(frame: Frame) -> str:
    source = f": {frame.source}" if frame.source else ""
    function = f" in {frame.function}" if frame.function != "<module>" else ""
    return f"{shorten_path(frame.file)}:{frame.line}{function}{source}"


def shorten_path(file: str) -> str:
    """Relative to the working directory, for what lies below it."""
    try:
        relative = os.path.relpath(file)
    except ValueError:
        return file
    return file if relative.startswith("..") or os.getcwd() == "/" else relative  # noqa: PTH109


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} other ranks"
    return f"ranks {', '.join(map(str, ranks))}"


def _clip(line: str) -> str:
    line = "".join(character if character.isprintable() else " " for character in line)
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
