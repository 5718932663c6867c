"""The command line: parse and dispatch, nothing else. Importing this imports no torch."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from phalanx import systems
from phalanx.errors import PhalanxError

_HELP = """\
phalanx: data-parallel training with PyTorch, started, joined, watched and explained.

commands:
  phalanx run [flags] script.py …   start a script in several processes (torchrun's flags)
  phalanx report [RUN]              how a run ended and why, or where it is; the latest below ./runs
  phalanx inspect [RUN]             what each rank of a run is doing now, and which one is slow
  phalanx doctor                    whether this machine is fit for it, and what to do where it is not
  phalanx checkpoint ls PATH        list checkpoints; also `verify` and `export`
  phalanx bench launch              measure how fast jobs start, beside torchrun and others
  phalanx bench collectives         measure how fast ranks communicate, beside gloo and MPI
  phalanx bench ddp-step            measure what that adds to a training step
  phalanx --version

`phalanx run --help` lists the flags. A script needs no change; `import phalanx as px` gives it more.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of the ``phalanx`` command; exits with the run's code."""
    _open_standard_streams()
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
        print(f"phalanx: there is no command {command!r}; `phalanx --help` lists them.", file=sys.stderr)
        sys.exit(2)
    sys.exit(_say_errors(lambda: commands[command](arguments[1:])))


def launch_main() -> None:
    """Entry of ``python -m phalanx.launch``."""
    _open_standard_streams()
    sys.exit(_say_errors(lambda: _launch(sys.argv[1:])))


def _open_standard_streams() -> None:
    """Also those that were closed when this process was started; Python has None in their place."""
    from phalanx.launch.process import python_command

    python_command.open_closed_streams()
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115 (as Python's own)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console that has no such character shows another one
            stream.reconfigure(errors="replace")


def _say_errors(command: Callable[[], int]) -> int:
    """A user's mistake is a sentence, not a traceback."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except PhalanxError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        if error.errno == errno.ENOSPC and not _has_unwritten_output():
            print(f"phalanx: a file cannot be written: {error.strerror}; free some space there.", file=sys.stderr)
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still in the buffer must not be tried again at exit
        if error.errno == errno.EPIPE:  # nobody reads on
            return 128 + signal.SIGPIPE
        print(f"phalanx: standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _has_unwritten_output() -> bool:
    """Standard output keeps what it could not write, and fails with it again."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _run(arguments: list[str]) -> int:
    systems.require_linux("phalanx run")
    from phalanx.launch import parse

    return _start(*parse.parse(arguments, os.environ), arguments)


def _launch(arguments: list[str]) -> int:
    systems.require_linux("phalanx.launch")
    from phalanx.launch import parse

    return _start(*parse.parse_launch(arguments, os.environ), arguments, is_launch=True)


def _start(spec, dry_run: bool, arguments: list[str], *, is_launch: bool = False) -> int:
    if dry_run:
        from phalanx.launch.dry_run import show

        show(spec, os.environ)
        return 0
    if spec.fleet is not None:
        from phalanx.launch.remote.conductor import conduct

        return conduct(spec, arguments, os.environ, is_launch=is_launch)
    from phalanx.launch.start import run

    return run(spec, os.environ)


def _bench(arguments: list[str]) -> int:
    systems.require_linux("phalanx bench")
    from phalanx import bench

    return bench.main(arguments)


def _checkpoint(arguments: list[str]) -> int:
    from phalanx.checkpoint import command

    return command.main(arguments)


def _doctor(arguments: list[str]) -> int:
    from phalanx.diagnose import doctor

    return doctor.main(arguments)


def _report(arguments: list[str]) -> int:
    from phalanx.diagnose import report_command

    return report_command.main(arguments)


def _inspect(arguments: list[str]) -> int:
    systems.require_linux("phalanx inspect")
    from phalanx.diagnose import inspect_command
    from phalanx.watchdog.stall.stack_dump import of_ranks

    return inspect_command.main(arguments, of_ranks)


def _version(_: list[str]) -> int:
    from importlib import metadata

    print(f"phalanx {metadata.version('phalanx')}")
    return 0


def _help(_: list[str]) -> int:
    print(_HELP, end="")
    return 0
