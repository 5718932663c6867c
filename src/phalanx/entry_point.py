"""How a process of phalanx begins and ends: its command, open standard streams, errors as sentences, the exit code."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from phalanx.errors import PhalanxError


def python_command(call: str, *, ahead: bool = False) -> list[str]:
    """The command that runs ``call``, such as ``phalanx.launch.process.zygote.main(5, fresh)``, in this interpreter.

    Nothing of the current directory gets in its way, and ``fresh`` names the modules that an interpreter has before
    anything of ours is imported. ``ahead``: this phalanx is taken before an installed one, in a process that has not
    got our PYTHONPATH.
    """
    import subprocess  # neither is needed by every command that opens its streams

    from phalanx.source_lines import SYS_PATH_ENTRY as root

    module = call.partition("(")[0].rpartition(".")[0]
    add, remove = f"sys.path.append({root!r})", "sys.path.pop()"
    if ahead:
        add, remove = f"sys.path.insert(0, {root!r})", "sys.path.pop(0)"
    text = (
        f"import sys; fresh = frozenset(sys.modules); sys.path[0] == '' and sys.path.pop(0); "
        f"{add}; import {module}; {remove}; {call}"
    )
    # -O, -W, -X and the like, as this interpreter was given them; multiprocessing does the same for its children.
    flags = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
    return [sys.executable, *flags, "-c", text]


def run(command: Callable[[], int]) -> NoReturn:
    """Ends this process with the command's exit code."""
    _open_standard_streams()
    sys.exit(_report_errors(command))


def _open_standard_streams() -> None:
    """Also those that were closed when this process was started; Python has None in their place."""
    open_closed_streams()
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115 (as Python's own)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console that has no such character shows another one
            stream.reconfigure(errors="replace")


def _report_errors(command: Callable[[], int]) -> int:
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


def open_closed_streams() -> list[int]:
    """Opens what is closed of 0, 1 and 2 to nothing: the next file would get the number, and be printed to."""
    opened = []
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened.append(os.open(os.devnull, os.O_RDWR))  # the lowest number that is free
            os.set_inheritable(opened[-1], True)
    return opened
