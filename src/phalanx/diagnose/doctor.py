"""``phalanx doctor``: whether this machine is fit for training, and what to do where it is not."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from phalanx.argparser import Parser
from phalanx.diagnose import check_machine, check_network, check_software, checkup
from phalanx.diagnose.checkup import Finding
from phalanx.diagnose.facts import Facts

Check = Callable[[Facts], Finding]

CHECKS: tuple[Check, ...] = (
    check_software.system,
    check_software.python,
    check_software.environment,
    check_software.command,
    check_software.torch,
    check_software.numpy,
    check_software.backends,
    check_software.devices,
    check_software.library,
    check_machine.cores,
    check_machine.threads,
    check_machine.memory,
    check_machine.shared_memory,
    check_machine.open_files,
    check_machine.processes,
    check_machine.disk,
    check_network.host_name,
    check_network.interfaces,
    check_network.ports,
    check_network.clock,
    check_machine.tools,
)
"""In the order in which they are told: what is installed, what the machine has, how it is reached."""

_DESCRIPTION = """\
Looks at this machine and says what is fit for training and what is not, a line each:

  ok        fine
  warning   works, but slowly, or not with several machines; the line ends with what helps
  error     keeps a run from working; the line ends with the command that mends it
  –         for your information

Nothing is changed, and torch is imported in a process of its own. The exit code is 1 when there is an error, else 0.
"""


def main(argv: list[str]) -> int:
    """Entry of ``phalanx doctor``; returns the exit code."""
    arguments = _parser().parse_args(argv)
    from phalanx.diagnose.gather import gather

    findings = examine(gather(os.environ, arguments.nproc_per_node))
    checkup.show(findings, as_json=arguments.json)
    return checkup.exit_code(findings)


def examine(facts: Facts) -> list[Finding]:
    """What all checks say."""
    return [check(facts) for check in CHECKS]


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
        help="the ranks you want to start here (default: one a card, or else one a core); cores, threads, memory and "
        "open files are judged by it",
    )
    parser.add_argument("--json", action="store_true", help="for programs: a list of name, value, verdict, advice")
    return parser


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give one like 4")
    return int(text)
