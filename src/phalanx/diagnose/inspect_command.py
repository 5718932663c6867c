"""``phalanx inspect``: the state of each rank of a run at this moment, or when it ended."""

from __future__ import annotations

import argparse
import dataclasses
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from phalanx import events, messages
from phalanx.argparser import Parser
from phalanx.devices import gpu_state
from phalanx.diagnose import rank_table
from phalanx.diagnose.rank_table import RankSample, Row, duration
from phalanx.diagnose.run_directory import (
    RankExited,
    as_written,
    exit_text,
    find_run,
    read_events,
    read_record,
    read_report,
)
from phalanx.errors import UsageError
from phalanx.events import RunFile
from phalanx.source_lines import shorten_path
from phalanx.status import layout, reading
from phalanx.status.stack_parser import Thread, main_thread
from phalanx.status.windows import read_windows
from phalanx.system import procfs
from phalanx.watchdog.stall.dump_file import stack_lines
from phalanx.watchdog.straggler import conditions

_DESCRIPTION = """\
Shows what each rank of a run on this machine is doing: its step, its phase and for how long, the collective that it
is in, how its time is divided between its loader, its own work and waiting for other ranks, its steps a second, and
what it takes of the machine. The last line names the slowest rank, or who waits for whom when no rank makes progress.

It stops nothing and slows nothing down. For a run that has ended it shows the last state of the ranks.
"""
_ANSWER_WITHIN = 5.0
"""Seconds. torch's flight recorder takes a while to find lines of code, the first time."""


@dataclass(frozen=True)
class View:
    """The state of a run; --json prints these fields."""

    directory: str
    host: str
    is_here: bool
    """The run is on this machine."""
    is_running: bool
    exit_code: int | None
    seconds: float
    """Seconds that the run has lasted."""
    between: float
    """Seconds between the two samples; 0: there was one."""
    world_size: int
    ranks: tuple[Row, ...]
    conclusion: str
    stacks: Mapping[int, Sequence[Thread]] = field(default_factory=dict)
    """The threads of each rank, with --stacks."""


Stacks = Callable[[Mapping[int, int], Path], Mapping[int, Sequence[Thread]]]
"""Returns the stacks of ranks, given their processes and the run directory."""


def main(argv: list[str], stacks_of: Stacks) -> int:
    """Entry of ``phalanx inspect``; returns the exit code."""
    arguments = parser().parse_args(argv)
    directory = find_run(arguments.run)
    with as_written(directory):
        view = inspect(directory, arguments.seconds)
        if arguments.stacks:
            living = {one.rank: one.pid for one in view.ranks if one.is_alive}
            allowed = {rank: pid for rank, pid in living.items() if _may_be_asked(directory, rank, pid)}
            view = dataclasses.replace(view, stacks=stacks_of(allowed, directory))
        text = messages.indented(view) if arguments.json else "\n".join(lines(view))
    print(text)
    return 0


def parser() -> Parser:
    made = Parser(
        prog="phalanx inspect",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("run", metavar="RUN", nargs="?", help="its directory (default: the latest one below ./runs)")
    made.add_argument(
        "--seconds",
        metavar="N",
        type=_seconds,
        default=1.0,
        help="measure shares and paces over N seconds (default %(default)g); 0: since the start",
    )
    made.add_argument("--stacks", action="store_true", help="also the stack of the main thread of each living rank")
    made.add_argument("--json", action="store_true", help="for programs: an object with a list of ranks")
    return made


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 3600; give one like 5")
    return found


def inspect(directory: Path, seconds: float) -> View:
    """Samples all ranks twice, so many seconds apart, if any of them is alive."""
    run = read_record(directory / events.RUN_FILE, RunFile)
    is_here = run.host == socket.gethostname()
    before = after = _sample(directory, is_here)
    if not before:
        raise UsageError(
            f"no rank of {shorten_path(str(directory))} has written what it does"
            f"{'' if is_here else ' on this machine'}; it has not started yet, or was stopped before it did."
        )
    is_running = any(sample.process is not None for sample in before.values())
    between = seconds if is_running else 0.0
    if between:
        time.sleep(between)
        after = _sample(directory, is_here)
        after |= _ask_for_collectives(directory, before, after)
    if is_running and any(sample.status.device for sample in after.values()):
        gpus = gpu_state.by_process()
        after = {rank: dataclasses.replace(one, gpu=gpus.get(one.status.pid)) for rank, one in after.items()}
    rows = tuple(rank_table.row(before.get(rank, sample), sample) for rank, sample in sorted(after.items()))
    report = read_report(directory)
    ended_at = max((sample.status.since for sample in after.values()), default=0.0)
    return View(
        directory=shorten_path(str(directory)),
        host=run.host,
        is_here=is_here,
        is_running=is_running and report is None,
        exit_code=report.exit_code if report else None,
        seconds=report.seconds if report else max(0.0, (time.time() if is_running else ended_at) - run.started),
        between=between,
        world_size=max(sample.status.world_size for sample in after.values()),
        ranks=rows,
        conclusion=report.hang.headline
        if report and report.hang
        else rank_table.conclusion(rows, {rank: sample.windows for rank, sample in after.items()}, between),
    )


def _sample(directory: Path, is_here: bool) -> dict[int, RankSample]:
    """All ranks of this node by their numbers."""
    exits = {(event.rank, event.pid): event for event in read_events(directory / events.AGENT_EVENTS, RankExited)}
    found: dict[int, RankSample] = {}
    for path in directory.glob("rank-*.status"):
        page, now = reading.read(path), time.time()
        if page is None:
            continue
        # Another process may have the pid by now.
        is_same = is_here and procfs.start_ticks(page.pid) == page.ticks
        look = conditions.looks([page.pid]).get(page.pid) if is_same else None
        event = exits.get((page.rank, page.pid))
        found[page.rank] = RankSample(
            *(now, page, look.process if look else None, look.cpu if look else 0.0, read_windows(path)),
            ended="" if event is None else exit_text(event, "exit"),
        )
    # Pages of an earlier attempt with more ranks may be left.
    world_size = max(found.values(), key=lambda sample: sample.status.started_at).status.world_size if found else 0
    return {rank: sample for rank, sample in found.items() if rank < world_size}


def _may_be_asked(directory: Path, rank: int, pid: int) -> bool:
    """Whoever wrote the page must own the process: a page can name any pid, and asking sends it a signal."""
    try:
        return layout.status_path(directory, rank).lstat().st_uid == procfs.owner(pid)
    except OSError:
        return False


def _ask_for_collectives(
    directory: Path, before: Mapping[int, RankSample], after: Mapping[int, RankSample]
) -> dict[int, RankSample]:
    """Asks ranks on gloo or nccl without progress in which collective they are; it takes them a while to answer."""
    paths = {
        rank: layout.status_path(directory, rank)
        for rank, sample in after.items()
        if sample.process is not None
        and _may_be_asked(directory, rank, sample.status.pid)
        and sample.process.state not in "Tt"  # it would not answer
        and sample.status.groups
        and sample.status.open_collective is None
        and rank in before
        and before[rank].status.progress == sample.status.progress
    }
    with ThreadPoolExecutor(len(paths) or 1) as pool:
        list(pool.map(lambda path: reading.ask(path, _ANSWER_WITHIN), paths.values()))
    pages = {rank: reading.read(path) for rank, path in paths.items()}
    return {
        rank: dataclasses.replace(after[rank], status=page)
        for rank, page in pages.items()
        if page is not None and page.pid == after[rank].status.pid
    }


def lines(view: View) -> list[str]:
    """The view as text."""
    return [
        *(_headline(view), *rank_table.table(view.ranks), *rank_table.long_waits(view.ranks)),
        *(f"rank {one.rank}: {one.gpu}" for one in view.ranks if one.gpu is not None),
        *(*_other_nodes(view), *_stacks(view), *filter(None, [view.conclusion])),
    ]


def _headline(view: View) -> str:
    where, lasted = f"{view.directory} on host {view.host}", duration(view.seconds)
    if view.is_running:
        span = f"the last {view.between:g} s" if view.between else "all of its time"
        return f"{where}, running for {lasted}; shares and paces of {span}"
    if view.exit_code is not None:
        return f"{where} ended with exit code {view.exit_code} after {lasted}; its last state:"
    if not view.is_here:
        return f"{view.directory} is a run on host {view.host}, look there; this is what its ranks have written"
    return f"{where} was killed after about {lasted}; its last state:"


def _other_nodes(view: View) -> list[str]:
    missing = sorted(set(range(view.world_size)) - {one.rank for one in view.ranks})
    if not missing:
        return []
    names = ", ".join(map(str, missing)) if len(missing) <= 8 else f"{missing[0]} to {missing[-1]}"
    count = f"{len(missing)} of {view.world_size} ranks ({names})"
    return [f"{count} are on other nodes: each has a directory of its own there"]


def _stacks(view: View) -> list[str]:
    found = []
    for rank, threads in sorted(view.stacks.items()):
        thread = main_thread(threads)
        stack = [f"rank {rank}: its stack is not known"]
        found += stack if thread is None else [f"rank {rank}, innermost first:", *stack_lines(thread)]
    return found
