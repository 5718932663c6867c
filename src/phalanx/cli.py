"""The command line: parse and dispatch, nothing else. Importing this imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from phalanx import entry_point
from phalanx.errors import UsageError
from phalanx.system import require_linux

_HELP = """\
phalanx: data-parallel training with PyTorch, started, joined, watched and explained.

commands:
  phalanx run [flags] script.py …   start a script in several processes (torchrun's flags)
  phalanx report [RUN]              how a run ended and why, or what it is doing; default: the latest
  phalanx inspect [RUN]             what each rank of a run is doing now, and which one is slow
  phalanx doctor                    checks whether this machine is fit for training, and prints fixes
  phalanx test                      runs a short job here, with the GPUs if there are any: what works?
  phalanx checkpoint ls PATH        list checkpoints; also `verify` and `export`
  phalanx bench launch              measure how fast jobs start, beside torchrun and others
  phalanx bench collectives         measure how fast ranks communicate, beside gloo and MPI
  phalanx --version

`phalanx run --help` lists the flags. A script needs no change; `import phalanx as px` gives it more.
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry of the ``phalanx`` command; exits with the run's code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    entry_point.run(lambda: _dispatch(arguments[0], arguments[1:]))


def _dispatch(command: str, arguments: list[str]) -> int:
    """Runs one command; each imports what it needs and nothing else."""
    if command in ("run", "bench", "inspect", "test"):
        require_linux(f"phalanx {command}")
    match command:
        case "run":
            from phalanx.launch.command import run as main
        case "bench":
            from phalanx.bench import main
        case "checkpoint":
            from phalanx.checkpoint.command import main
        case "doctor":
            from phalanx.diagnose.doctor.command import main
        case "test":
            from phalanx.self_test.command import main
        case "report":
            from phalanx.diagnose.report_command import main
        case "inspect":
            from phalanx.diagnose import inspect_command
            from phalanx.watchdog.stall.stack_dump import of_ranks

            return inspect_command.main(arguments, of_ranks)
        case "--version":
            from importlib import metadata

            print(f"phalanx {metadata.version('phalanx')}")
            return 0
        case "--help" | "-h":
            print(_HELP, end="")
            return 0
        case _:
            raise UsageError(f"there is no command {command!r}; `phalanx --help` lists them.")
    return main(arguments)
