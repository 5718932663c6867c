"""``phalanx doctor``: whether this machine is fit for training, and what to do where it is not."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from phalanx.argparser import Parser
from phalanx.diagnose.doctor import machine, network, software, torch_build, torch_probe
from phalanx.diagnose.doctor.finding import Facts, Finding, Verdict, counted
from phalanx.system import cores
from phalanx.system.cgroups import allowance

Check = Callable[[Facts], Finding]

CHECKS: tuple[Check, ...] = (
    *(software.system, software.python, software.environment, software.command),
    *(torch_build.torch, torch_build.numpy, torch_build.backends, torch_build.devices, torch_build.library),
    *(machine.cores, machine.threads, machine.memory, machine.shared_memory, machine.open_files, machine.processes),
    machine.disk,
    *(network.host_name, network.interfaces, network.ports, network.clock, network.tools),
)
"""In the order in which they are printed: what is installed, what the machine has, how it is reached."""

_COLOURS: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "info": "dim"}
_DESCRIPTION = """\
Reports what on this machine is fit for training and what is not, one line each:

  ok        fine
  warning   works, but slowly, or not with several machines; the line ends with what helps
  error     keeps a run from working; the line ends with the command that fixes it
  –         for your information

Nothing is changed, and torch is imported in a process of its own. The exit code is 1 when there is an error, else 0.
"""


def main(argv: list[str]) -> int:
    """Entry of ``phalanx doctor``; returns the exit code."""
    arguments = _parser().parse_args(argv)
    findings = examine(gather(os.environ, arguments.nproc_per_node))
    _show(findings, as_json=arguments.json)
    return exit_code(findings)


def gather(environ: Mapping[str, str], ranks: int | None = None) -> Facts:
    """Everything about this machine; ``ranks`` is what the user means to start on it."""
    with torch_probe.started(environ) as probe:  # which takes longest, so the rest happens meanwhile
        allowed = allowance()
        return Facts(
            platform=sys.platform,
            kernel=software.kernel(),
            container=software.container(),
            asked_ranks=ranks,
            python=software.read_python(environ),
            gpus=torch_build.read_gpus(environ),
            cores=cores.count(),
            omp_num_threads=environ.get("OMP_NUM_THREADS"),
            memory=machine.read_memory(allowed),
            shared_memory=machine.read_space(Path("/dev/shm")),
            limits=machine.read_limits(allowed),
            network=network.read_network(environ),
            clock=network.read_clock(),
            runs=machine.where_runs_go(environ),
            tools={name: shutil.which(name, path=environ.get("PATH")) for name in network.TOOLS},
            torch=torch_probe.answer(probe),
        )


def examine(facts: Facts) -> list[Finding]:
    """What all checks say."""
    return [check(facts) for check in CHECKS]


def _show(findings: Sequence[Finding], *, as_json: bool = False) -> None:
    """Prints them: JSON, a line each in a file or a pipe, or folded and coloured on a terminal."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        _show_on_terminal(findings)
    else:
        print("\n".join(lines(findings)))


def exit_code(findings: Sequence[Finding]) -> int:
    return 1 if any(finding.verdict == "error" for finding in findings) else 0


def lines(findings: Sequence[Finding]) -> list[str]:
    """One for each, never folded, so that a search finds the advice beside the verdict; the counts at the end."""
    width = max(len(finding.name) for finding in findings)
    told = []
    for finding in findings:
        advice = f"; {finding.advice}" if finding.advice else ""
        told.append(f"{_word(finding):<7}  {finding.name:<{width}}  {finding.value}{advice}")
    return [*told, summary(findings)]


def summary(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _COLOURS}
    ending = "" if counts["error"] else "; nothing here keeps a run from working"
    return (
        f"{counts['ok']} ok, {counted(counts['warning'], 'warning')}, {counted(counts['error'], 'error')}"
        f"{ending if counts['warning'] else ''}"
    )


def _show_on_terminal(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.verdict]
        value = Text(finding.value)
        if finding.advice:
            value.append(f"\n→ {finding.advice}", style=colour)
        table.add_row(Text(_word(finding), style=colour), finding.name, value)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(summary(findings))


def _word(finding: Finding) -> str:
    return "–" if finding.verdict == "info" else finding.verdict


def _parser() -> Parser:
    parser = Parser(
        prog="phalanx doctor",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        *("--nproc-per-node", "--nproc_per_node"),
        metavar="N",
        type=_positive,
        help="ranks to start here (default: one per GPU, or else one per core); cores, threads, memory and "
        "open files are judged by it",
    )
    parser.add_argument("--json", action="store_true", help="for programs: a list of name, value, verdict, advice")
    return parser


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give one like 4")
    return int(text)
