"""A run as its directory tells it, whether it has ended, goes on, or lost its launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx import events, messages, run_files, status
from phalanx.errors import ForeignData, UsageError
from phalanx.messages import Record
from phalanx.run_records import (
    HangRecord,
    KnownEvent,
    OtherEvent,
    RankExited,
    RankStarted,
    ReportFile,
    Restarting,
    RunFile,
    Stalled,
)
from phalanx.status.reading import Status

_TAIL_BYTES = 8192
T = TypeVar("T", bound=Record)


@dataclass(frozen=True)
class Stall:
    """All ranks stood still for a while, or to the end."""

    after: float
    """Seconds after the start of the run when it was told."""
    headline: str
    until: float | None
    """When they went on, if they did."""


class RankTrace(Record, frozen=True):
    """What a rank of a run without a report has left."""

    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    has_exited: bool
    status: Status | None


@dataclass(frozen=True)
class Run:
    """What is known of it."""

    directory: Path
    command: tuple[str, ...]
    working_directory: str
    host: str
    started: float
    seconds: float
    """Until its end, until now, or until the last that was heard of it."""
    state: str
    """``ended``, ``running``, or ``lost``: its launcher was killed, and could not say how it ended."""
    attempts: int
    restarts: tuple[Restarting, ...]
    """With the number of the attempt that failed, from 1."""
    stalls: tuple[Stall, ...]
    report: ReportFile | None
    """When it has ended."""
    traces: tuple[RankTrace, ...]
    """Of this node, when there is no report."""


def _last_heard(directory: Path, noted: Sequence[OtherEvent], started: float) -> float:
    """Of the launcher by its events, of the ranks by their pages."""
    pages = filter(None, map(status.read, directory.glob("rank-*.status")))
    return max([started, *(each.time for each in noted), *(page.since for page in pages)])


def load(directory: Path) -> Run:
    """Reads what there is."""
    with as_written(directory):
        return _load(directory)


@contextlib.contextmanager
def as_written(directory: Path) -> Iterator[None]:
    """Whoever owns a run directory can write there what they like: what we cannot read is an error of one sentence."""
    try:
        yield
    except UsageError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of numbers in a page
        raise UsageError(
            f"{directory} cannot be read: its files are not as this version of `phalanx run` writes them "
            f"({type(error).__name__}); give a run directory of it."
        ) from None


def _load(directory: Path) -> Run:
    order = read_record(directory / events.RUN_FILE, RunFile)
    report = read_report(directory)
    log = directory / events.AGENT_EVENTS
    is_running = report is None and events.is_being_written(log)
    noted: list[Any] = events.read_events(log, KnownEvent)
    restarts = tuple(each for each in noted if isinstance(each, Restarting))
    last = time.time() if is_running else _last_heard(directory, events.read_events(log, OtherEvent), order.started)
    return Run(
        directory=directory,
        command=order.command,
        working_directory=order.directory,
        host=order.host,
        started=order.started,
        seconds=report.seconds if report else last - order.started,
        state="ended" if report else "running" if is_running else "lost",
        attempts=report.attempts if report else len(restarts) + 1,
        restarts=restarts,
        stalls=_stalls(noted, order.started),
        report=report,
        traces=() if report else _traces(directory, noted),
    )


def read_report(directory: Path) -> ReportFile | None:
    """None when the run has not ended, or not in order."""
    path = directory / events.REPORT_FILE
    return read_record(path, ReportFile) if path.exists() else None


def read_record(path: Path, shape: type[T]) -> T:
    """A file of a run directory."""
    try:
        return messages.decode(run_files.read(path), shape, str(path), run_files.MOST_BYTES)
    except (OSError, ForeignData) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise UsageError(f"{path} cannot be read: {reason}; the directory is no whole run directory.") from None


def _stalls(noted: Sequence[object], started: float) -> tuple[Stall, ...]:
    """A verdict that is repeated counts once; an event without one says that the ranks make progress again."""
    found: list[Stall] = []
    for each in noted:
        last = found[-1] if found else None
        match each:
            case Stalled(at, None) if last is not None:
                found[-1] = dataclasses.replace(last, until=at - started)
            case Stalled(at, HangRecord(headline)) if last is None or last.headline != headline:
                found.append(Stall(at - started, headline, None))
    return tuple(found)


def _traces(directory: Path, noted: Sequence[object]) -> tuple[RankTrace, ...]:
    """Of the last attempt: its processes are the ones that were started after the last restart."""
    found: dict[int, RankTrace] = {}
    for each in noted:
        match each:
            case Restarting():
                found.clear()
            case RankStarted(_, rank, pid):
                found[rank] = RankTrace(rank, pid, None, None, False, _page(directory, rank, pid))
            case RankExited(_, rank, pid, code, signal):
                found[rank] = RankTrace(rank, pid, code, signal, True, _page(directory, rank, pid))
    return tuple(found[rank] for rank in sorted(found))


def _page(directory: Path, rank: int, pid: int) -> Status | None:
    page = status.read(status.status_path(directory, rank))
    return page if page is not None and page.pid == pid else None


def last_lines(directory: Path, rank: int, count: int) -> list[str]:
    """Of a rank's log; none when there is no log here, as for a rank of another node."""
    path = events.log_path(directory, rank)
    try:
        text = run_files.read(path, max(0, path.stat().st_size - _TAIL_BYTES), 2 * _TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
