"""``phalanx test``: starts real runs on this machine and prints what works, as a table for a bug report."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from phalanx import env, messages
from phalanx.argparser import Parser, whole_number
from phalanx.entry_point import python_command
from phalanx.errors import UsageError
from phalanx.messages import Record
from phalanx.self_test.results import Result, combined
from phalanx.source_lines import clip

_DESCRIPTION = """\
Runs a short training job on this machine and prints what works, a line each:

  start           phalanx run starts the ranks
  collectives     every collective of torch.distributed gives the right values
  ddp             DistributedDataParallel trains as one process does
  data_parallel   px.data_parallel does too
  checkpoint      a saved state is loaded, equal to the last bit
  restart         a killed rank ends the attempt, and the next one resumes from the checkpoint

With GPUs it takes the GPUs and NCCL. The exit code is 0 when everything passed, else 1. Paste the table into a report.
"""
_TOGETHER = ["start", "collectives", "ddp", "data_parallel", "checkpoint"]
_LIMIT, _TICK = 180.0, 0.5  # seconds for one of the two runs, and between two looks at what has passed
_STOPPING = {"terminate": 30.0, "kill": 5.0}  # how a run is stopped, and the seconds that it has to end


class Report(Record, frozen=True):
    """What ``--json`` prints."""

    software: dict[str, str]
    ranks: int | None
    checks: tuple[Result, ...]


def main(argv: list[str]) -> int:
    """Entry of ``phalanx test``; returns the exit code."""
    arguments = _parser().parse_args(argv)
    given = arguments.nproc_per_node
    number = int(given) if given.removeprefix("-").isdecimal() else given
    asked = None if number in ("gpu", "auto") else whole_number("--nproc-per-node", number, 1, 1024)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the run and its directory are removed
    try:
        temporary = tempfile.TemporaryDirectory(prefix="phalanx-test-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(f"there is no directory for temporary files: {error.strerror}; set TMPDIR to one.") from None
    with temporary as name:
        report = _report(Path(name), asked)
    print(messages.indented(report) if arguments.json else "\n".join(lines(report)))
    return 1 if any(check.failed for check in report.checks) else 0


def lines(report: Report) -> list[str]:
    """The table."""
    facts = {**report.software, "ranks": report.ranks or "not known"}
    return [*(f"{name:<14}{text}" for name, text in facts.items()), "", *map(_line, report.checks)]


def _line(check: Result) -> str:
    word = "FAILED" if check.failed else "ok" if check.ranks else "not run"
    return f"{check.name:<14}{word:<8}{check.seconds:5.1f} s  {clip(check.detail)}".rstrip()


def _report(directory: Path, asked: int | None) -> Report:
    """Two runs: one for most checks, and one that is killed and restarted."""
    shown: set[str] = set()
    found = _run(directory, str(asked or "gpu"), _TOGETHER, shown)
    if asked is None and "--nproc-per-node gpu" in found[0].detail:  # there is none
        found = _run(directory, "2", _TOGETHER, shown)
    elif asked is None and found[0].detail == "on the CPU":
        told = f"{found[0].ranks} GPUs are counted here, and torch can use none: `phalanx doctor` tells more"
        found[0] = messages.replace(found[0], failed=True, detail=told)
    if any(check.failed for check in found):
        found.append(Result("restart", False, 0.0))
    else:
        found += _run(directory, str(found[0].ranks), ["restart"], shown, "--max-restarts", "1")
    _show(found, shown)
    versions = dict.fromkeys(("phalanx", "torch"), "not installed")
    versions |= {name: each.version for name in versions for each in metadata.distributions(name=name)}
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"
    software = {**versions, "Python": platform.python_version(), "system": system}
    return Report(software, found[0].ranks or asked, tuple(found))


def _run(directory: Path, ranks: str, names: list[str], shown: set[str], *flags: str) -> list[Result]:
    """One run of some checks. ``shown``: those that were printed."""
    started = time.monotonic()  # the ranks have the same clock
    command = [*python_command("phalanx.cli.main()"), "run", "--standalone", "--nproc-per-node", ranks, *flags]
    command += ["--log-dir", str(directory / "runs"), "-m", "phalanx.self_test.checks", str(directory), str(started)]
    run = subprocess.Popen(
        [*command, *names],
        cwd=directory,
        env={name: text for name, text in os.environ.items() if not name.startswith(env.PET_PREFIX)}
        | {"TMPDIR": str(directory)},  # torch leaves files in it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = b"not done after %g s" % _LIMIT
    try:
        while time.monotonic() - started < _LIMIT:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = run.communicate(timeout=_TICK)
                break
            _show([result for result in combined(directory).values() if not result.failed], shown)
    finally:
        _stop(run)
    told = output.decode(errors="replace").strip().splitlines() or [f"exit code {run.returncode}"]
    reason = next((line for line in told if " failed: " in line), told[-1])
    return _results(directory, names, reason if run.returncode != 0 else "")


def _stop(run: subprocess.Popen[bytes]) -> None:
    for how, seconds in _STOPPING.items():
        if run.poll() is None:
            getattr(run, how)()
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.communicate(timeout=seconds)


def _results(directory: Path, names: list[str], reason: str) -> list[Result]:
    """``reason``: why the run failed. The first check that not all ranks have passed gets it, or else the last one."""
    found = combined(directory)
    results = [found.get(name) or Result(name, False, 0.0) for name in names]
    at = next((index for index, result in enumerate(results) if result.failed or not result.ranks), -1)
    if reason and not results[at].failed:
        results[at] = messages.replace(results[at], failed=True, detail=reason)
    return results


def _show(results: list[Result], shown: set[str]) -> None:
    for result in results:
        if result.name not in shown:
            print(f"phalanx test: {_line(result)}", file=sys.stderr, flush=True)
    shown.update(result.name for result in results)


def _parser() -> Parser:
    parser = Parser("phalanx test", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks = "--nproc-per-node", "--nproc_per_node"
    parser.add_argument(*ranks, default="gpu", metavar="N", help="ranks; by default one for each GPU, or 2 on CPUs")
    parser.add_argument("--json", action="store_true", help="for a program to read")
    return parser
