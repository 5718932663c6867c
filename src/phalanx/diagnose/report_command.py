"""``phalanx report``: how a run ended, or where it is, from what stands in its directory."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx import events, messages
from phalanx.argparser import Parser
from phalanx.diagnose import run_directory
from phalanx.diagnose.run_directory import RankTrace, Run
from phalanx.failure.failure_text import headline
from phalanx.failure.signal_meaning import signal_name
from phalanx.run_records import ReportFile
from phalanx.source_lines import clip, shorten_path
from phalanx.status.reading import Status
from phalanx.system.sizes import in_bytes

_DESCRIPTION = """\
Reports how a run was started, how it ended and why, how each rank ended, and where the logs are. Of one that still
runs, or whose launcher was killed, it reports what is known. The exit code is 0 whatever the run's own was.
"""
_TAIL_LINES = 3
_TAILS = 8


def main(argv: list[str]) -> int:
    """Entry of ``phalanx report``; returns the exit code."""
    arguments = parser().parse_args(argv)
    directory = events.find_run(arguments.run)
    with run_directory.as_written(directory):
        run = run_directory.load(directory)
        if arguments.json:
            told = messages.indented(run.report if run.report is not None else _fields(run))
        else:
            told = "\n".join(lines(run))
    print(told)
    return 0


def parser() -> Parser:
    made = Parser(prog="phalanx report", description=_DESCRIPTION, allow_abbrev=False)
    made.add_argument(
        *("run",),
        metavar="RUN",
        nargs="?",
        help="the run directory, or its name below ./runs (default: the latest run there)",
    )
    made.add_argument("--json", action="store_true", help="for programs: report.json")
    return made


def lines(run: Run) -> list[str]:
    """All that is to be said."""
    told = [shlex.join([Path(run.command[0]).name, *run.command[1:]])]
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    told.append(f"  started {started} on {run.host}, in {run.working_directory}")
    told.append(f"  {_outcome(run)}")
    told += _nodes(run)
    for restart in run.restarts:
        told.append(clip(f"  attempt {restart.attempt}: {restart.cause}"))
    told += _stalls(run)
    if run.report is not None:
        told += _said(run.report)
    ranks = _ended_ranks(run) if run.report is not None else _seen_ranks(run)
    return [*told, "", *ranks, f"logs: {shorten_path(str(run.directory.absolute()))}"]


def _stalls(run: Run) -> list[str]:
    """Unless it is what the run ended for, which is told at length."""
    if run.report is not None and run.report.hang:
        return []
    told = []
    for stall in run.stalls:
        until = f" (until {_duration(stall.until)})" if stall.until is not None else ""
        told.append(clip(f"  stalled after {_duration(stall.after)}{until}: {stall.headline}"))
    stacks = [path.name for path in sorted(run.directory.glob("stall-*.txt"))] if told else []
    return [*told, f"  all stacks: {', '.join(stacks)} there"] if stacks else told


def _said(report: ReportFile) -> list[str]:
    """What was on the console: why the ranks stood still, why the run failed, who was slow."""
    hang = report.hang.lines if report.hang is not None else ()
    slow = [clip(str(straggler.get("said"))) for straggler in report.stragglers]
    return [line for block in (hang, report.said, slow) if block for line in ("", *block)]


def _outcome(run: Run) -> str:
    attempts = f", in attempt {run.attempts}" if run.attempts > 1 else ""
    if run.report is not None:
        code = run.report.exit_code
        stopped = (
            f" ({signal_name(code - 128)})"
            if code > 128 and run.report.cause is None and run.report.hang is None
            else ""
        )
        return f"ended with exit code {code}{stopped} after {_duration(run.seconds)}{attempts}"
    if run.state == "running":
        return f"is running, for {_duration(run.seconds)} so far{attempts}"
    return (
        f"lost its launcher, which was killed and has left no {events.REPORT_FILE}; its last event was after "
        f"{_duration(run.seconds)}{attempts}"
    )


def _nodes(run: Run) -> list[str]:
    nodes = run.report.nodes if run.report is not None else {}
    if len(nodes) < 2:
        return []
    return [clip(f"  node {host}: {_rank_list(node.ranks)}, logs in {node.directory}") for host, node in nodes.items()]


# ---- ranks of a run that has ended


def _ended_ranks(run: Run) -> list[str]:
    assert run.report is not None
    told = []
    tails = 0
    for ending in sorted(run.report.ranks, key=lambda ending: ending.rank):
        memory = f", {in_bytes(ending.memory)} at most" if ending.memory else ""
        why = f": {headline(ending)}" if ending.error is not None else ""
        told.append(clip(f"rank {ending.rank}: {_role(run, ending)}, {_end(ending)}{memory}{why}"))
        if ending.failed and tails < _TAILS and not _is_cause(run, ending):
            tails += 1
            found = run_directory.last_lines(run.directory, ending.rank, _TAIL_LINES) or ending.tail[-_TAIL_LINES:]
            told += [clip(f"    {line}") for line in found]
    return told


def _role(run: Run, ending: events.Ending) -> str:
    assert run.report is not None
    if _is_cause(run, ending):
        return "the cause"
    if ending.rank in run.report.alike:
        return "failed in the same way"
    if any(ending.rank in side.ranks for side in run.report.elsewhere):
        return "called another collective"
    if ending.rank in run.report.victims:
        return "a victim"
    return "ended normally" if not ending.failed else "stopped"


def _is_cause(run: Run, ending: events.Ending) -> bool:
    """Whose last lines stand above already."""
    cause = run.report.cause if run.report is not None else None
    return cause is not None and cause.rank == ending.rank


def _end(ending: events.Ending) -> str:
    if ending.signal is not None:
        by = " from the launcher" if ending.asked and ending.out_of_memory is None else ""
        return f"{signal_name(ending.signal)}{by}"
    return f"exit code {ending.exit_code}"


# ---- ranks of a run that has not, or not in order


def _seen_ranks(run: Run) -> list[str]:
    if not run.traces:
        return ["no rank was started"]
    told = []
    for trace in run.traces:
        told.append(clip(f"rank {trace.rank}: pid {trace.pid}, {_seen(trace, run.state)}"))
        if run.state == "lost":
            told += [clip(f"    {line}") for line in run_directory.last_lines(run.directory, trace.rank, _TAIL_LINES)]
    return told


def _seen(trace: RankTrace, state: str) -> str:
    if trace.has_exited:
        how = f"exit code {trace.exit_code}" if trace.signal is None else signal_name(trace.signal)
        return f"ended with {how}"
    if trace.status is None:
        return "runs" if state == "running" else "ended with the launcher"
    return _doing(trace.status, "" if state == "running" else "last seen ")


def _doing(page: Status, prefix: str) -> str:
    words = [f"{prefix}in phase {page.phase} since {time.strftime('%H:%M:%S', time.localtime(page.since))}"]
    if page.step:
        words.append(f"epoch {page.epoch}, step {page.step}")
    elif page.updates:
        words.append(f"{page.updates} optimizer steps")
    waits = page.open_collective
    if waits is not None:
        place = f", {waits.place}" if waits.place else ""
        words.append(f"waits in {waits.op} #{waits.number}{place}")
    return ", ".join(words)


def _fields(run: Run) -> dict[str, object]:
    """For a run without a report, in the same words where there are any."""
    return {
        "state": run.state,
        "exit_code": None,
        "attempts": run.attempts,
        "started": run.started,
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
