"""``phalanx report``: how a run ended, or its state if it has not, from the files in its directory."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx import events, messages
from phalanx.argparser import Parser
from phalanx.diagnose import run_directory
from phalanx.diagnose.run_directory import RankTrace, Run, exit_text
from phalanx.events import ReportFile
from phalanx.failure.failure_text import headline
from phalanx.source_lines import clip, shorten_path
from phalanx.system import in_bytes

_DESCRIPTION = """\
Reports how a run was started, how it ended and why, how each rank ended, and where the logs are. For one that is
running, or whose launcher was killed, it reports what is known. The exit code is 0 whatever the run's own was.
"""
_TAIL_LINES = 3
_TAILS = 8


def main(argv: list[str]) -> int:
    """Entry of ``phalanx report``; returns the exit code."""
    arguments = parser().parse_args(argv)
    directory = run_directory.find_run(arguments.run)
    with run_directory.as_written(directory):
        run = run_directory.load(directory)
        text = messages.indented(run.report or _fields(run)) if arguments.json else "\n".join(lines(run))
    print(text)
    return 0


def parser() -> Parser:
    made = Parser(prog="phalanx report", description=_DESCRIPTION, allow_abbrev=False)
    where = "the run directory, or its name below ./runs (default: the latest run there)"
    made.add_argument("run", metavar="RUN", nargs="?", help=where)
    made.add_argument("--json", action="store_true", help="for programs: report.json")
    return made


def lines(run: Run) -> list[str]:
    """The whole report."""
    file, report = run.file, run.report
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.started))
    return [
        shlex.join([Path(file.command[0]).name, *file.command[1:]]),
        f"  started {started} on {file.host}, in {file.directory}",
        f"  {_outcome(run)}",
        *(_nodes(report) if report else ()),
        *(clip(f"  attempt {restart.attempt}: {restart.cause}") for restart in run.restarts),
        *_stalls(run),
        *(_console_lines(report) if report else ()),
        "",
        *(_ended_ranks(run, report) if report else _traced_ranks(run)),
        f"logs: {shorten_path(str(run.directory.absolute()))}",
    ]


def _outcome(run: Run) -> str:
    lasted, attempts = _duration(run.seconds), f", in attempt {run.attempts}" if run.attempts > 1 else ""
    if run.report is not None:
        stop = run.report.stop
        stopped = f", stopped by {stop.by}," if stop is not None else ""
        return f"ended with exit code {run.report.exit_code}{stopped} after {lasted}{attempts}"
    if run.state == "running":
        return f"is running, for {lasted} so far{attempts}"
    killed = f"lost its launcher, which was killed and has left no {events.REPORT_FILE}"
    return f"{killed}; its last event was after {lasted}{attempts}"


def _nodes(report: ReportFile) -> list[str]:
    """One line a node, if there are several."""
    nodes = report.nodes.items() if len(report.nodes) > 1 else ()
    return [clip(f"  node {host}: {_rank_list(node.ranks)}, logs in {node.directory}") for host, node in nodes]


def _stalls(run: Run) -> list[str]:
    """The stalls, unless one ended the run: then the report's own lines have it."""
    if not run.stalls or (run.report is not None and run.report.hang):
        return []
    found = []
    for stall in run.stalls:
        until = f" (until {_duration(stall.until)})" if stall.until is not None else ""
        found.append(clip(f"  stalled after {_duration(stall.after)}{until}: {stall.headline}"))
    stacks = ", ".join(path.name for path in sorted(run.directory.glob("stall-*.txt")))
    return [*found, f"  all stacks: {stacks} there"] if stacks else found


def _console_lines(report: ReportFile) -> list[str]:
    """The lines that were on the console: why no rank made progress, why the run failed, which ranks were slow."""
    hang = report.hang.lines if report.hang is not None else ()
    slow = [clip(str(straggler.get("said"))) for straggler in report.stragglers]
    return [line for block in (hang, report.said, slow) if block for line in ("", *block)]


# ---- ranks of a run that has ended


def _ended_ranks(run: Run, report: ReportFile) -> list[str]:
    found = []
    tails = 0
    for ending in sorted(report.ranks, key=lambda ending: ending.rank):
        role = _role(report, ending)
        by = " from the launcher" if ending.signal and ending.asked and ending.out_of_memory is None else ""
        memory = f", {in_bytes(ending.memory)} at most" if ending.memory else ""
        why = f": {headline(ending)}" if ending.error is not None or ending.device_error is not None else ""
        found.append(clip(f"rank {ending.rank}: {role}, {exit_text(ending)}{by}{memory}{why}"))
        found += [clip(f"    {sentence}") for sentence in ending.evidence if role != "the cause" and not ending.asked]
        if ending.failed and tails < _TAILS and role != "the cause":  # whose lines are above already
            tails += 1
            logged = [] if ending.crash else run_directory.last_lines(run.directory, ending.rank, _TAIL_LINES)
            last = logged or ending.tail[-_TAIL_LINES:]  # the log of a crash ends with all stacks
            found += [clip(f"    {line}") for line in last]
    return found


def _role(report: ReportFile, ending: events.Ending) -> str:
    if report.cause is not None and report.cause.rank == ending.rank:
        return "the cause"
    if ending.rank in report.alike:
        return "failed in the same way"
    if any(ending.rank in side.ranks for side in report.elsewhere):
        return "called another collective"
    if ending.rank in report.victims:
        return "a victim"
    return "ended normally" if not ending.failed else "stopped"


# ---- ranks of a run without a report


def _traced_ranks(run: Run) -> list[str]:
    found = [] if run.traces else ["no rank was started"]
    for trace in run.traces:
        found.append(clip(f"rank {trace.rank}: pid {trace.pid}, {_trace_text(trace, run.state == 'running')}"))
        if run.state == "lost":
            last = run_directory.last_lines(run.directory, trace.rank, _TAIL_LINES)
            found += [clip(f"    {line}") for line in last]
    return found


def _trace_text(trace: RankTrace, is_running: bool) -> str:
    page = trace.status
    if trace.has_exited:
        return f"ended with {exit_text(trace)}"
    if page is None:
        return "runs" if is_running else "ended with the launcher"
    seen = "" if is_running else "last seen "
    words = [f"{seen}in phase {page.phase} since {time.strftime('%H:%M:%S', time.localtime(page.since))}"]
    if page.step:
        words.append(f"epoch {page.epoch}, step {page.step}")
    elif page.updates:
        words.append(f"{page.updates} optimizer steps")
    collective = page.open_collective
    if collective is not None:
        place = f", {collective.place}" if collective.place else ""
        words.append(f"waits in {collective.op} #{collective.number}{place}")
    return ", ".join(words)


def _fields(run: Run) -> dict[str, object]:
    """The JSON for a run without a report; the names are those of report.json where it has them."""
    return {
        "state": run.state,
        "exit_code": None,
        "attempts": run.attempts,
        "started": run.file.started,
        "seconds": round(run.seconds, 3),
        "restarts": [{"attempt": restart.attempt, "reason": restart.cause} for restart in run.restarts],
        "ranks": run.traces,
    }


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def _rank_list(ranks: Sequence[int]) -> str:
    """``ranks 0-3``, or ``rank 0``; a node's ranks follow each other."""
    return f"ranks {min(ranks)}-{max(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
