"""``phalanx test``: starts real runs on this machine and prints what works, as a table for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from phalanx import messages
from phalanx.argparser import Parser
from phalanx.devices import gpu_state
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
_TOGETHER = ["collectives", "ddp", "data_parallel", "checkpoint"]
_LIMIT = 180.0
"""Seconds for one of the two runs."""


class Report(Record, frozen=True):
    """What ``--json`` prints."""

    software: dict[str, str]
    gpus: tuple[str, ...]
    ranks: int
    checks: tuple[Result, ...]


def main(argv: list[str]) -> int:
    """Entry of ``phalanx test``; returns the exit code."""
    arguments = _parser().parse_args(argv)
    ranks = arguments.nproc_per_node or _rank_count()
    with tempfile.TemporaryDirectory(prefix="phalanx-test-") as directory:
        report = Report(_software(), _gpus(), ranks, tuple(_checks(Path(directory), ranks)))
    print(messages.indented(report) if arguments.json else "\n".join(lines(report)))
    return 1 if any(check.failed for check in report.checks) else 0


def lines(report: Report) -> list[str]:
    """The table."""
    head = [f"{name:<14}{text}" for name, text in report.software.items()]
    head += [f"{'GPUs':<14}{', '.join(report.gpus) or 'none'}", f"{'ranks':<14}{report.ranks}"]
    body = [
        f"{check.name:<14}{'FAILED' if check.failed else 'ok':<8}{check.seconds:5.1f} s  {clip(check.detail)}".rstrip()
        for check in report.checks
    ]
    return [*head, "", *body]


def _checks(directory: Path, ranks: int) -> list[Result]:
    found = _run(directory, ranks, _TOGETHER, [])
    if any(check.failed for check in found):
        return found
    return [*found, *_run(directory, ranks, ["restart"], ["--max-restarts", "1"])[1:]]


def _run(directory: Path, ranks: int, names: list[str], flags: list[str]) -> list[Result]:
    """One run of some checks; the first result is that it started and ended as it should."""
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(ranks), *flags]
    command += ["--log-dir", str(directory / "runs"), "-m", "phalanx.self_test.checks", str(directory), *names]
    started = time.perf_counter()
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=False)
        failed, output = run.returncode != 0, run.stderr + run.stdout
    except subprocess.TimeoutExpired as error:
        failed, output = True, f"not done after {_LIMIT:g} s; {error.stderr or ''}"
    checks = combined(directory, names, ranks)
    took = time.perf_counter() - started - sum(check.seconds for check in checks)
    is_reached = any(not check.detail.startswith("not reached") for check in checks)
    reason = next((line for line in output.splitlines() if " failed: " in line), output.strip()[-500:])
    return [
        Result("start", not is_reached, max(took, 0.0), "" if is_reached else reason),
        *_explained(checks, failed, reason),
    ]


def _explained(checks: list[Result], failed: bool, reason: str) -> list[Result]:
    """A run that failed though no check did: its last check gets the reason."""
    if failed and not any(check.failed for check in checks):
        checks[-1] = messages.replace(checks[-1], failed=True, detail=reason)
    return checks


def _rank_count() -> int:
    """All GPUs, or two ranks on CPUs."""
    return len(_gpus()) or 2


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(gpu.name for gpu in gpu_state.read(names))


def _software() -> dict[str, str]:
    found = {"phalanx": _version("phalanx"), "torch": _version("torch"), "Python": platform.python_version()}
    return found | {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(os.cpu_count()),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _parser() -> Parser:
    parser = Parser("phalanx test", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=int, metavar="N", help="ranks; all GPUs by default, or 2 on CPUs"
    )
    parser.add_argument("--json", action="store_true", help="for a program to read")
    return parser
