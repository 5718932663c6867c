"""``phalanx doctor``: whether this machine is fit for training, and what to do where it is not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from phalanx.argparser import Parser
from phalanx.diagnose.doctor import gpus, machine, network, software, torch_build, torch_probe
from phalanx.diagnose.doctor.finding import Facts, Finding, Judgement, Verdict, counted
from phalanx.system import cgroups, procfs

Check = Callable[[Facts], Judgement | None]

CHECKS: dict[str, Check] = {
    "system": software.system,
    "pid 1": software.init,
    "python": software.python,
    "environment": software.environment,
    "command": software.command,
    "torch": torch_build.torch,
    "numpy": torch_build.numpy,
    "backends": torch_build.backends,
    "devices": torch_build.devices,
    "driver": gpus.driver,
    "capability": gpus.capability,
    "NCCL": gpus.nccl,
    "GPU links": gpus.links,
    "fabric": gpus.fabric_manager,
    "persistence": gpus.persistence,
    "C library": torch_build.library,
    "cores": machine.cores,
    "threads": machine.threads,
    "memory": machine.memory,
    "/dev/shm": machine.shared_memory,
    "open files": machine.open_files,
    "processes": machine.processes,
    "memlock": machine.locked_memory,
    "disk": machine.disk,
    "host name": network.host_name,
    "master": network.master,
    "interfaces": network.interfaces,
    "ports": network.ports,
    "RDMA": network.rdma_ports,
    "clock": network.clock,
    "tools": network.tools,
}
"""The checks by name, in the order in which they are printed. One that returns None does not concern the machine."""

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
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        _show_on_terminal(findings)
    else:
        print("\n".join(lines(findings)))
    return exit_code(findings)


def gather(environ: Mapping[str, str], ranks: int | None = None) -> Facts:
    """Reads everything about this machine; ``ranks``: how many the user wants to start on it."""
    with torch_probe.started(environ) as probe:  # it takes longest, so the rest is read meanwhile
        allowed = cgroups.allowance()
        return Facts(
            platform=sys.platform,
            kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
            container=(container := software.container(environ)),
            init=procfs.command(1) if container else None,
            asked_ranks=ranks,
            python=software.read_python(environ),
            gpus=torch_build.read_gpus(environ),
            nvidia=gpus.ask_nvidia_smi(environ),
            cores=cgroups.cores(),
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
    """The findings of all checks."""
    return [Finding(name, *found) for name, check in CHECKS.items() if (found := check(facts)) is not None]


def exit_code(findings: Sequence[Finding]) -> int:
    return 1 if any(finding.verdict == "error" for finding in findings) else 0


def lines(findings: Sequence[Finding]) -> list[str]:
    """One line each, never folded, so that a search finds the advice beside the verdict; the counts at the end."""
    width = max(len(finding.name) for finding in findings)
    text = (f"{finding.value}; {finding.advice}" if finding.advice else finding.value for finding in findings)
    columns = zip(map(_word, findings), (finding.name for finding in findings), text, strict=True)
    return [*(f"{word:<7}  {name:<{width}}  {value}" for word, name, value in columns), summary(findings)]


def summary(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _COLOURS}
    harmless = "; nothing here keeps a run from working" if counts["warning"] and not counts["error"] else ""
    return f"{counts['ok']} ok, {counted(counts['warning'], 'warning')}, {counted(counts['error'], 'error')}{harmless}"


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
