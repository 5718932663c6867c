"""Reads a run from its directory, whether it has ended, is running, or has lost its launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, overload

from phalanx import events, messages, run_files
from phalanx.env import PET_PREFIX
from phalanx.errors import ForeignData, UsageError
from phalanx.events import RUN_FILE, Ending, HangRecord, ReportFile, RunFile
from phalanx.failure.device_errors import is_noise
from phalanx.failure.signal_meaning import signal_name
from phalanx.messages import Count, ExitCode, Message, Rank, Record, Seconds, Signal, Text
from phalanx.status import layout, reading
from phalanx.status.reading import Status

_TAIL_BYTES = 8192
T = TypeVar("T")


class AgentEvent(Message, frozen=True, tag_field="event", forbid_unknown_fields=False):
    time: Seconds


class RankStarted(AgentEvent, frozen=True, tag="started"):
    rank: Rank
    pid: Count


class RankExited(AgentEvent, frozen=True, tag="exited"):
    rank: Rank
    pid: Count
    exit_code: ExitCode | None
    signal: Signal | None


class Restarting(AgentEvent, frozen=True, tag="restarting"):
    attempt: Count
    cause: Text


class Stalled(AgentEvent, frozen=True, tag="stall"):
    verdict: HangRecord | None
    """None: the ranks make progress again."""


KnownEvent = RankStarted | RankExited | Restarting | Stalled


class OtherEvent(Record, frozen=True, forbid_unknown_fields=False):
    """Any event, read for its time."""

    event: str
    time: Seconds


@dataclass(frozen=True)
class Stall:
    """A time in which no rank made progress."""

    after: float
    """Seconds from the start of the run to the verdict."""
    headline: str
    until: float | None
    """When they made progress again, if they did."""


class RankTrace(Record, frozen=True):
    """The traces of one rank of a run without a report."""

    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    has_exited: bool
    status: Status | None


@dataclass(frozen=True)
class Run:
    """Everything that is known of a run."""

    directory: Path
    file: RunFile
    report: ReportFile | None
    state: Literal["ended", "running", "lost"]
    """``lost``: its launcher was killed, and wrote no report."""
    seconds: float
    """Seconds until its end, until now, or until the last sign of life."""
    attempts: int
    restarts: tuple[Restarting, ...]
    """Each has the number of the attempt that failed, from 1."""
    stalls: tuple[Stall, ...]
    traces: tuple[RankTrace, ...]
    """The ranks of this node, when there is no report."""


# ---- which run


def find_run(text: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The run directory that a person means: a path, a name below the directory of runs, or None for the latest."""
    try:
        return _find_run(text, Path(environ.get(f"{PET_PREFIX}LOG_DIR") or "runs"))
    except OSError as error:
        whose = "; it belongs to another user" if isinstance(error, PermissionError) else ""
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}{whose}.") from None


def _find_run(text: str | None, base: Path) -> Path:
    if text is None:
        found = _latest(base)
        if found is None:
            raise UsageError(f"there is no run below {base}; give the directory that `phalanx run` printed.")
        return found
    for path in (Path(text), base / text):
        found = path if (path / RUN_FILE).exists() else _latest(path)
        if found is not None:
            return found
    what = "has no run.json" if Path(text).exists() else "does not exist"
    raise UsageError(f"{text} is no run directory: it {what}; give one that `phalanx run` printed.")


def _latest(base: Path) -> Path | None:
    """The latest run below ``base``: by the link, or without one by the names, which begin with the date."""
    latest = base / "latest"
    if latest.is_symlink() and (latest / RUN_FILE).exists():
        name = latest.readlink()
        if len(name.parts) == 1:  # any other was not made by us, and leads elsewhere
            return base / name
    return max((path.parent for path in base.glob(f"[0-9]*/{RUN_FILE}")), default=None)


# ---- reading it


@contextlib.contextmanager
def as_written(directory: Path) -> Iterator[None]:
    """Makes any error of the block a UsageError: the files are not as this version writes them."""
    try:
        yield
    except UsageError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # numbers in a page that make no sense
        raise UsageError(
            f"{directory} cannot be read: its files are not as this version of `phalanx run` writes them "
            f"({type(error).__name__}); give a run directory of it."
        ) from None


def load(directory: Path) -> Run:
    """Reads the run. Its owner can write anything there, so call it within `as_written`."""
    file = read_record(directory / RUN_FILE, RunFile)
    report = read_report(directory)
    log = directory / events.AGENT_EVENTS
    is_running = report is None and is_being_written(log)
    known: list[KnownEvent] = read_events(log, KnownEvent)
    restarts = tuple(event for event in known if isinstance(event, Restarting))
    last = time.time() if is_running else _last_sign_of_life(directory, file.started)
    return Run(
        directory=directory,
        file=file,
        report=report,
        state="ended" if report else "running" if is_running else "lost",
        seconds=report.seconds if report else last - file.started,
        attempts=report.attempts if report else len(restarts) + 1,
        restarts=restarts,
        stalls=_stalls(known, file.started),
        traces=() if report else _traces(directory, known),
    )


def _last_sign_of_life(directory: Path, started: float) -> float:
    """The time of the launcher's last event, or of the last change of a rank's page."""
    noted = read_events(directory / events.AGENT_EVENTS, OtherEvent)
    pages = filter(None, map(reading.read, directory.glob("rank-*.status")))
    return max([started, *(event.time for event in noted), *(page.since for page in pages)])


def read_report(directory: Path) -> ReportFile | None:
    """None when the run has not ended, or its launcher was killed."""
    path = directory / events.REPORT_FILE
    return read_record(path, ReportFile) if path.exists() else None


def read_record(path: Path, shape: type[T]) -> T:
    """Reads a file of a run directory."""
    try:
        return messages.decode(run_files.read(path), shape, str(path), run_files.MOST_BYTES)
    except (OSError, ForeignData) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise UsageError(f"{path} cannot be read: {reason}; the directory is no whole run directory.") from None


def _stalls(known: Sequence[object], started: float) -> tuple[Stall, ...]:
    """A verdict that is repeated counts once; an event without one means that the ranks make progress again."""
    found: list[Stall] = []
    for event in known:
        last = found[-1] if found else None
        match event:
            case Stalled(at, None) if last is not None:
                found[-1] = dataclasses.replace(last, until=at - started)
            case Stalled(at, HangRecord(headline)) if last is None or last.headline != headline:
                found.append(Stall(at - started, headline, None))
    return tuple(found)


def _traces(directory: Path, known: Sequence[object]) -> tuple[RankTrace, ...]:
    """The ranks of the last attempt: those that were started after the last restart."""
    found: dict[int, RankTrace] = {}
    for event in known:
        match event:
            case Restarting():
                found.clear()
            case RankStarted(_, rank, pid):
                page = reading.read(layout.status_path(directory, rank))
                own = page if page is not None and page.pid == pid else None
                found[rank] = RankTrace(rank, pid, None, None, False, own)
            case RankExited(_, rank, _, code, signal) if rank in found:
                found[rank] = messages.replace(found[rank], exit_code=code, signal=signal, has_exited=True)
    return tuple(found[rank] for rank in sorted(found))


def is_being_written(path: Path) -> bool:
    """True while the process that writes this event file lives, whatever its pid and whoever has that by now."""
    import fcntl  # not on Windows

    try:
        fd = run_files.open_to_read(path)
    except OSError:  # there is none, or it cannot be read
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)  # any other: a file system without locks
    else:
        return False
    finally:
        os.close(fd)


@overload
def read_events(path: Path, shape: type[T] = dict[str, Any]) -> list[T]: ...
@overload
def read_events(path: Path, shape: UnionType) -> list[Any]: ...


def read_events(path: Path, shape: Any = dict[str, Any]) -> list[Any]:
    """All events of this shape. On a full disk the last one may be cut off, and is left out."""
    try:
        lines = run_files.read(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    found = []
    for line in lines:
        with contextlib.suppress(ForeignData):
            found.append(messages.decode(line, shape, str(path)))
    return found


def last_lines(directory: Path, rank: int, count: int) -> list[str]:
    """The last lines of a rank's log; none for a rank of another node, whose log is there."""
    path = events.log_path(directory, rank)
    try:
        text = run_files.read(path, max(0, path.stat().st_size - _TAIL_BYTES), 2 * _TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if not is_noise(line)][-count:]


def exit_text(ended: Ending | RankExited | RankTrace, word: str = "exit code") -> str:
    """``SIGKILL``, or ``exit code 1``."""
    return f"{word} {ended.exit_code}" if ended.signal is None else signal_name(ended.signal)
