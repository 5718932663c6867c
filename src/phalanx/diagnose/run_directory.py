"""A run as its directory tells it, whether it has ended, goes on, or lost its launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx import events, plain, run_files, status
from phalanx.errors import ForeignData, UsageError
from phalanx.status import Status

_TAIL_BYTES = 8192


@dataclass(frozen=True)
class Restart:
    """Why another attempt was begun."""

    attempt: int
    """The number of the one that failed, from 1."""
    reason: str


@dataclass(frozen=True)
class Stall:
    """All ranks stood still for a while, or to the end."""

    after: float
    """Seconds after the start of the run when it was told."""
    headline: str
    until: float | None
    """When they went on, if they did."""


@dataclass(frozen=True)
class RankTrace:
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
    command: list[str]
    working_directory: str
    host: str
    started: float
    seconds: float
    """Until its end, until now, or until the last that was heard of it."""
    state: str
    """``ended``, ``running``, or ``lost``: its launcher was killed, and could not say how it ended."""
    attempts: int
    restarts: tuple[Restart, ...]
    stalls: tuple[Stall, ...]
    report: dict[str, Any] | None
    """report.json, when it has ended."""
    endings: tuple[events.Ending, ...]
    traces: tuple[RankTrace, ...]
    """Of this node, when there is no report."""


def _last_heard(directory: Path, noted: Sequence[Mapping[str, Any]], started: float) -> float:
    """Of the launcher by its events, of the ranks by their pages."""
    pages = filter(None, map(status.read, directory.glob("rank-*.status")))
    return max([started, *(each["time"] for each in noted), *(page.since for page in pages)])


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
    except (LookupError, TypeError, ValueError, AttributeError, ForeignData) as error:
        raise UsageError(
            f"{directory} cannot be read: its files are not as this version of `phalanx run` writes them "
            f"({type(error).__name__}); give a run directory of it."
        ) from None


def _load(directory: Path) -> Run:
    order = read_json(directory / events.RUN_FILE)
    report = read_json(directory / events.REPORT_FILE) if (directory / events.REPORT_FILE).exists() else None
    log = directory / events.AGENT_EVENTS
    is_running = report is None and events.is_being_written(log)
    noted = events.read_events(log)
    restarts = tuple(Restart(int(each["attempt"]), each["cause"]) for each in noted if each["event"] == "restarting")
    last = time.time() if is_running else _last_heard(directory, noted, order["started"])
    return Run(
        directory=directory,
        command=order["command"],
        working_directory=order["directory"],
        host=order["host"],
        started=order["started"],
        seconds=report["seconds"] if report else last - order["started"],
        state="ended" if report else "running" if is_running else "lost",
        attempts=report["attempts"] if report else len(restarts) + 1,
        restarts=restarts,
        stalls=_stalls(noted, order["started"]),
        report=report,
        endings=tuple(events.ending_from_fields(fields) for fields in report["ranks"]) if report else (),
        traces=() if report else _traces(directory, noted),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A file of a run directory."""
    try:
        return plain.decode(run_files.read(path), dict[str, Any], str(path))
    except (OSError, ForeignData) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise UsageError(f"{path} cannot be read: {reason}; the directory is no whole run directory.") from None


def _stalls(noted: list[dict[str, Any]], started: float) -> tuple[Stall, ...]:
    """What is told again when the picture changes is one; and that they go on is an event without a verdict."""
    found: list[Stall] = []
    for each in noted:
        last = found[-1] if found else None
        if each["event"] != "stall":
            continue
        if each["verdict"] is not None and (last is None or last.headline != each["verdict"]["headline"]):
            found.append(Stall(each["time"] - started, each["verdict"]["headline"], None))
        elif each["verdict"] is None and last is not None:
            found[-1] = dataclasses.replace(last, until=each["time"] - started)
    return tuple(found)


def _traces(directory: Path, noted: list[dict[str, Any]]) -> tuple[RankTrace, ...]:
    """Of the last attempt: its processes are the ones that were started after the last restart."""
    found: dict[int, RankTrace] = {}
    for each in noted:
        if each["event"] == "restarting":
            found.clear()
        elif each["event"] in ("started", "exited"):
            rank, pid = each["rank"], each["pid"]
            page = status.read(status.status_path(directory, rank))
            found[rank] = RankTrace(
                *(rank, pid, each.get("exit_code"), each.get("signal"), each["event"] == "exited"),
                page if page is not None and page.pid == pid else None,
            )
    return tuple(found[rank] for rank in sorted(found))


def last_lines(directory: Path, rank: int, count: int) -> list[str]:
    """Of a rank's log; none when there is no log here, as for a rank of another node."""
    path = events.log_path(directory, rank)
    try:
        text = run_files.read(path, max(0, path.stat().st_size - _TAIL_BYTES), 2 * _TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
