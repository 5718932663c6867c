"""The command line: parse and dispatch, nothing else. Importing this imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
  phalanx checkpoint ls PATH        list checkpoints; also `verify` and `export`
  phalanx bench launch              measure how fast jobs start, beside torchrun and others
  phalanx bench collectives         measure how fast ranks communicate, beside gloo and MPI
  phalanx --version

`phalanx run --help` lists the flags. A script needs no change; `import phalanx as px` gives it more.
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry of the ``phalanx`` command; exits with the run's code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "bench": _bench,
        "checkpoint": _checkpoint,
        "doctor": _doctor,
        "report": _report,
        "inspect": _inspect,
        "--version": _version,
        "--help": _help,
        "-h": _help,
    }
    if command not in commands:
        entry_point.run(lambda: _unknown(command))
    entry_point.run(lambda: commands[command](arguments[1:]))


def _run(arguments: list[str]) -> int:
    require_linux("phalanx run")
    from phalanx.launch import command

    return command.run(arguments)


def _bench(arguments: list[str]) -> int:
    require_linux("phalanx bench")
    from phalanx import bench

    return bench.main(arguments)


def _checkpoint(arguments: list[str]) -> int:
    from phalanx.checkpoint import command

    return command.main(arguments)


def _doctor(arguments: list[str]) -> int:
    from phalanx.diagnose.doctor import command

    return command.main(arguments)


def _report(arguments: list[str]) -> int:
    from phalanx.diagnose import report_command

    return report_command.main(arguments)


def _inspect(arguments: list[str]) -> int:
    require_linux("phalanx inspect")
    from phalanx.diagnose import inspect_command
    from phalanx.watchdog.stall.stack_dump import of_ranks

    return inspect_command.main(arguments, of_ranks)


def _version(_: list[str]) -> int:
    from importlib import metadata

    print(f"phalanx {metadata.version('phalanx')}")
    return 0


def _unknown(command: str) -> int:
    raise UsageError(f"there is no command {command!r}; `phalanx --help` lists them.")


def _help(_: list[str]) -> int:
    print(_HELP, end="")
    return 0
