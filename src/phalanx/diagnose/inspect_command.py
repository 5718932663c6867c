"""``phalanx inspect``: how the ranks of a run stand at this moment, or stood when it ended."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from phalanx import events, messages, status
from phalanx.argparser import Parser
from phalanx.diagnose import rank_table
from phalanx.diagnose.rank_table import RankLook, Row
from phalanx.diagnose.run_directory import as_written, read_record, read_report
from phalanx.errors import UsageError
from phalanx.run_records import RankExited, RunFile
from phalanx.source_lines import shorten_path
from phalanx.status.stack_parser import Thread, main_thread
from phalanx.system import procfs
from phalanx.watchdog.stall.dump_file import stack_lines
from phalanx.watchdog.straggler import conditions

_DESCRIPTION = """\
Shows what each rank of a run on this machine is doing: its step, its phase and for how long, the collective that it
is in, how its time is divided between its loader, its own work and waiting for other ranks, its steps a second, and
what it takes of the machine. The last line names the slowest rank, or, when no rank makes progress, who waits for whom.

Nothing is stopped or slowed down by it. Of a run that has ended it shows the last state.
"""
_ANSWER_WITHIN = 5.0
"""Seconds. What torch's flight recorder knows of lines of code takes it a while, the first time."""
_WIDTH = 100
_LONG_WAIT = 0.5
"""Seconds from which on the line of code is told."""


@dataclasses.dataclass(frozen=True)
class View:
    """What there is to be seen of a run."""

    directory: str
    host: str
    is_here: bool
    """On this machine."""
    is_running: bool
    exit_code: int | None
    seconds: float
    """That it has run."""
    between: float
    """Seconds between the two looks; 0: there was one."""
    world_size: int
    rows: tuple[Row, ...]
    conclusion: str
    stacks: Mapping[int, Sequence[Thread]] = dataclasses.field(default_factory=dict)
    """Of each rank, if they were asked for."""


Stacks = Callable[[Mapping[int, int], Path], Mapping[int, Sequence[Thread]]]
"""From the processes of ranks, and the run directory, to their stacks."""


def main(argv: list[str], stacks_of: Stacks) -> int:
    """Entry of ``phalanx inspect``; returns the exit code."""
    arguments = _parser().parse_args(argv)
    directory = events.find_run(arguments.run)
    with as_written(directory):
        view = inspect(directory, arguments.seconds)
        if arguments.stacks:
            living = {
                one.rank: one.pid for one in view.rows if one.is_alive and _may_be_asked(directory, one.rank, one.pid)
            }
            view = dataclasses.replace(view, stacks=stacks_of(living, directory))
        told = messages.indented(as_json(view)) if arguments.json else "\n".join(lines(view))
    print(told)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="phalanx inspect",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="its directory (default: the latest one below ./runs)")
    parser.add_argument(
        "--seconds",
        metavar="N",
        type=_seconds,
        default=1.0,
        help="shares and paces are of so many seconds from now (default %(default)g); 0: since the start",
    )
    parser.add_argument("--stacks", action="store_true", help="also the stack of each living rank's main thread")
    parser.add_argument("--json", action="store_true", help="for programs: an object with a list of ranks")
    return parser


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 3600; give one like 5")
    return found


def inspect(directory: Path, seconds: float) -> View:
    """Looks twice, so many seconds apart, if there is anybody to be looked at."""
    run = read_record(directory / events.RUN_FILE, RunFile)
    is_here = run.host == socket.gethostname()
    before = _look(directory, is_here)
    if not before:
        raise UsageError(
            f"no rank of {shorten_path(str(directory))} has written what it does"
            f"{'' if is_here else ' on this machine'}; it has not started yet, or was stopped before it did."
        )
    is_running = any(look.process is not None for look in before.values())
    if is_running and seconds > 0:
        time.sleep(seconds)
    between = seconds if is_running else 0.0
    after = _look(directory, is_here) if between else before
    after = _after_asking(directory, before, after) if between else after
    rows = tuple(rank_table.row(before.get(rank, look), look) for rank, look in sorted(after.items()))
    report = read_report(directory)
    ended_at = max((look.status.since for look in after.values()), default=0.0)
    return View(
        directory=shorten_path(str(directory)),
        host=run.host,
        is_here=is_here,
        is_running=is_running and report is None,
        exit_code=report.exit_code if report else None,
        seconds=report.seconds if report else max(0.0, (time.time() if is_running else ended_at) - run.started),
        between=between,
        world_size=max(look.status.world_size for look in after.values()),
        rows=rows,
        conclusion=report.hang.headline
        if report and report.hang
        else rank_table.conclusion(rows, {rank: look.windows for rank, look in after.items()}, between),
    )


def _look(directory: Path, is_here: bool) -> dict[int, RankLook]:
    """At all ranks of this node."""
    exits = {
        (event.rank, event.pid): _ending(event)
        for event in events.read_events(directory / events.AGENT_EVENTS, RankExited)
    }
    found: dict[int, RankLook] = {}
    for path in directory.glob("rank-*.status"):
        page, now = status.read(path), time.time()
        if page is None:
            continue
        # A pid may be somebody else's by now.
        is_same = is_here and procfs.start_ticks(page.pid) == page.ticks
        known = conditions.looks([page.pid]).get(page.pid) if is_same else None
        found[page.rank] = RankLook(
            now,
            page,
            known.process if known else None,
            known.cpu if known else 0.0,
            status.windows(path),
            exits.get((page.rank, page.pid), ""),
        )
    # Of an earlier attempt with more ranks there may be pages that nobody writes any more.
    world_size = max(found.values(), key=lambda look: look.status.started_at).status.world_size if found else 0
    return {rank: look for rank, look in found.items() if rank < world_size}


def _ending(event: RankExited) -> str:
    if event.signal is None:
        return f"exit {event.exit_code}"
    try:
        return signal.Signals(event.signal).name
    except ValueError:
        return f"signal {event.signal}"


def _may_be_asked(directory: Path, rank: int, pid: int) -> bool:
    """Whoever wrote the page must own the process: a page can name any, and asking sends it a signal."""
    try:
        return status.status_path(directory, rank).lstat().st_uid == procfs.owner(pid)
    except OSError:
        return False


def _after_asking(
    directory: Path, before: Mapping[int, RankLook], after: Mapping[int, RankLook]
) -> dict[int, RankLook]:
    """Ranks on gloo or nccl that have not got on are asked in which collective they are; it takes them a while."""
    standing_still = [
        rank
        for rank, look in after.items()
        if look.process is not None
        and _may_be_asked(directory, rank, look.status.pid)
        and look.process.state not in "Tt"  # it would not answer
        and look.status.groups
        and look.status.open_collective is None
        and rank in before
        and before[rank].status.progress == look.status.progress
    ]
    if not standing_still:
        return dict(after)
    with ThreadPoolExecutor(len(standing_still)) as pool:
        list(pool.map(lambda rank: status.ask(status.status_path(directory, rank), _ANSWER_WITHIN), standing_still))
    asked = {}
    for rank in standing_still:
        page = status.read(status.status_path(directory, rank))
        if page is not None and page.pid == after[rank].status.pid:
            asked[rank] = dataclasses.replace(after[rank], status=page)
    return {**after, **asked}


def as_json(view: View) -> dict[str, Any]:
    fields = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
    return {**{name: value for name, value in fields.items() if name != "rows"}, "ranks": view.rows}


def lines(view: View) -> list[str]:
    """For people."""
    return [
        *(_headline(view), *table(view.rows), *_waits(view.rows), *_elsewhere(view), *_stacks(view)),
        *filter(None, [view.conclusion]),
    ]


def _stacks(view: View) -> Iterator[str]:
    for rank, threads in sorted(view.stacks.items()):
        thread = main_thread(threads)
        yield f"rank {rank}, innermost first:" if thread is not None else f"rank {rank}: its stack is not known"
        yield from stack_lines(thread) if thread is not None else ()


def _headline(view: View) -> str:
    ran = rank_table.duration(view.seconds)
    if view.is_running:
        span = f"the last {view.between:g} s" if view.between else "all of its time"
        return f"{view.directory} on host {view.host}, running for {ran}; shares and paces of {span}"
    if view.exit_code is not None:
        return (
            f"{view.directory} on host {view.host} ended with exit code {view.exit_code} after {ran}; its last state:"
        )
    if not view.is_here:
        return f"{view.directory} is a run on host {view.host}, look there; this is what its ranks have written"
    return f"{view.directory} on host {view.host} was killed after about {ran}; its last state:"


def table(rows: Sequence[Row]) -> list[str]:
    """At most 100 columns."""
    header = ["rank", "pid", "step", "phase", "steps/s", "data", "compute", "wait", "CPU", "memory", "in"]
    cells = [header, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    left = {2, 3, 10}
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )[:_WIDTH].rstrip()
        for line in cells
    ]


def _cells(one: Row) -> list[str]:
    step = f"{one.epoch}/{one.step}" if one.step or one.epoch else str(one.updates)
    phase = "stopped" if one.is_stopped else one.phase
    phase = f"{phase} {rank_table.duration(one.seconds)}" if one.is_alive and one.seconds >= 0.1 else phase
    return [
        str(one.rank),
        str(one.pid) if one.is_alive else one.ended or "ended",
        step,
        phase,
        "–" if one.pace is None else f"{one.pace:.3g}",
        *(_share(share) for share in (one.data, one.compute, one.wait, one.cpu)),
        "–" if one.resident is None else f"{one.resident / 2**20:.0f} MiB",
        "" if one.collective is None else rank_table.call(one.collective),
    ]


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.0f} %"


def _waits(rows: Sequence[Row]) -> list[str]:
    """Those that have waited for long, with the line of code; together, where it is the same."""
    alike: dict[str, list[Row]] = {}
    for one in rows:
        if one.collective is not None and (one.waiting >= _LONG_WAIT or not one.is_alive):
            alike.setdefault(_where(one), []).append(one)
    told = []
    for where, those in alike.items():
        longest = max(one.waiting for one in those)
        verb = f"wait{'s' * (len(those) == 1)} since {rank_table.duration(longest)}" if longest else "ended"
        told.append(f"{rank_table.ranks(those)} {verb} in {where}")
    return told


def _where(one: Row) -> str:
    collective = one.collective
    assert collective is not None
    what = f", {collective.size} × {collective.dtype}" if collective.dtype else ""
    peer = f" with rank {collective.peer} of its group" if collective.peer is not None else ""
    place = collective.place
    line = f", {shorten_path(place.file)}:{place.line}" if place is not None else ""
    return f"{rank_table.call(collective)}{what}{peer}{line}"


def _elsewhere(view: View) -> list[str]:
    missing = sorted(set(range(view.world_size)) - {one.rank for one in view.rows})
    if not missing:
        return []
    names = ", ".join(map(str, missing)) if len(missing) <= 8 else f"{missing[0]} to {missing[-1]}"
    return [
        f"{len(missing)} of {view.world_size} ranks ({names}) are on other nodes: each has a directory of its own there"
    ]
