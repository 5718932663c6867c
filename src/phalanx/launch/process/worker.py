"""Inside a worker: from the fork to the last line of the script.

The same code serves a forked child and a fresh interpreter; the difference ends with `become`. The script runs as
``__main__``, as ``python script.py`` would run it; what it raises is reported to the agent before anything else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import io
import json
import os
import runpy
import signal
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from phalanx import secret
from phalanx.entry_point import python_command
from phalanx.launch.process import exit_report, process_tree, torch_setup
from phalanx.preemption import stop_point
from phalanx.source_lines import LAUNCHER
from phalanx.status import layout, notices, own_page
from phalanx.torch_compat import names as torch_names

if TYPE_CHECKING:  # a rank in an interpreter of its own imports nothing but the standard library before its script
    from phalanx.launch.process.fresh_modules import FreshModules
    from phalanx.launch.spec.launch_spec import WorkerSpec

_run_module_as_main = runpy._run_module_as_main  # pyright: ignore[reportAttributeAccessIssue]  # it is `python -m`
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for the script; the zygote ignores them."""


@dataclass(frozen=True)
class Birth:
    """What a new child inherits from the zygote."""

    spec: WorkerSpec
    parent: int
    fds: list[int]
    """stdin, stdout, stderr, the report pipe; for a function also its pickle and the files it refers to."""
    fresh_modules: FreshModules
    by_exec: bool
    shadowed: bool
    """A file beside the script has the name of a module that even our own start-up imports."""


class Script(NamedTuple):
    """What a worker runs; it is sent to an interpreter of its own as JSON."""

    rank: int
    kind: str
    """As in `Program`."""
    target: str
    argv: list[str]


def become(birth: Birth) -> None:
    """The child's side of the fork: a session of its own, its files and environment, then the script."""
    spec = birth.spec
    if spec.cpus is not None:  # first of all: memory is placed where it is first written
        os.sched_setaffinity(0, spec.cpus)
    os.setsid()
    process_tree.die_with_parent(birth.parent)
    for target, fd in enumerate(birth.fds[:3]):
        os.dup2(fd, target)  # makes the target inheritable
        os.close(fd)
    os.environ.clear()
    os.environ.update(spec.environment)
    if birth.by_exec:
        _exec(spec, birth.fds[3:], birth.shadowed)
    birth.fresh_modules.restore()
    run(_script(spec), birth.fds[3], birth.fds[4:])


def _script(spec: WorkerSpec) -> Script:
    return Script(spec.rank, spec.program.kind, spec.program.target, spec.argv())


def _exec(spec: WorkerSpec, fds: list[int], shadowed: bool) -> None:
    program = spec.program
    argv = spec.argv()
    interpreter = program.interpreter
    if shadowed and program.kind in ("script", "module"):
        interpreter = sys.executable  # without our start-up: Python runs the script and prints its traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these two; the program should not inherit that
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        if program.kind == "command":
            os.execvp(argv[0], argv)
        if interpreter is not None:
            os.execvp(interpreter, [interpreter, "-u", *(["-m"] * (program.kind == "module")), *argv])
    except OSError as error:
        _report(fds[0], exit_report.error_report(spec.rank, error, None, 127))
        os._exit(127)
    from phalanx.fd_channel import anonymous_file  # loaded already in the child of a zygote

    note = anonymous_file("worker")
    with os.fdopen(os.dup(note), "w") as file:
        json.dump([_script(spec), secret.text()], file)
    for fd in (note, *fds):
        os.set_inheritable(fd, True)
    os.execv(sys.executable, python_command(f"phalanx.launch.process.worker.main({[note, *fds]})"))


def main(fds: list[int]) -> None:
    """The entry of a worker in an interpreter of its own."""
    note, report, *rest = fds
    for fd in fds:
        os.set_inheritable(fd, False)
    os.lseek(note, 0, os.SEEK_SET)
    with os.fdopen(note) as file:
        script, text = json.load(file)
    secret.keep(text)
    torch_setup.install_on_import()
    run(Script(*script), report, rest)


def run(script: Script, report: int, fds: list[int]) -> None:
    """Runs the program; how it ends is how this process ends."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # not in blocks, as for a pipe
    report = own_page.move_fd_up(report)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=report)  # after a crash in C the agent then knows the Python line
    pid = os.getpid()
    exit_report.report_thread_deaths(lambda death: os.getpid() == pid and _report(report, {"thread": death}))
    notices.report_by(
        lambda text: os.getpid() == pid and _report(report, {"notice": text}),
        lambda error: os.getpid() == pid and _report_leaving(script.rank, report, error),
    )
    _begin_page(script.rank, lambda number, reason: os.getpid() == pid and _report(report, _stop(number, reason)))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)  # those that came since the fork arrive here
        try:
            _run_program(script, fds)
        except BaseException:
            exit_report.ignore_loader_sigchld()
            exit_report.ignore_interrupts()
            raise
        _end_page()
    except BaseException as error:
        if os.getpid() == pid:  # a script's own fork may come back here as well
            _end_with(script.rank, report, error)
        raise


def _stop(number: int, reason: str) -> dict[str, object]:
    return {"stop": {"signal": number, "reason": reason}}


def _begin_page(rank: int, request_stop: Callable[[int, str], bool]) -> None:
    directory = os.environ.get("PHALANX_RUN_DIR")
    if directory is not None:
        own_page.begin(Path(directory), rank, int(os.environ["WORLD_SIZE"]))
        torch_names.report_to(Path(directory), rank)
        page = own_page.current()
        if page is not None:
            stop_point.begin(page.memory, request_stop)


def _end_page() -> None:
    """Marks the rank as done: the script's last line has run, though its exit handlers may still take time."""
    page = own_page.current()
    if page is not None:
        page.enter(layout.DONE)


def _run_program(script: Script, fds: list[int]) -> None:
    rank, kind, target, argv = script
    if kind == "function":
        from phalanx.launch.process import pickled_function

        pickled_function.call(rank, fds)
        return
    _clear_main()
    sys.argv[:] = argv
    sys.orig_argv[1:] = ["-m", *sys.argv] if kind == "module" else list(sys.argv)
    if kind == "module":
        _first_on_path(str(Path.cwd()))
        _run_module_as_main(target, True)
    elif kind == "path":
        runpy.run_path(target, run_name="__main__")
    elif Path(target).is_dir() or zipfile.is_zipfile(target):
        _first_on_path(target)
        _run_module_as_main("__main__", False)
    else:
        _run_script(target)


def _run_script(target: str) -> None:
    _first_on_path(str(Path(target).resolve().parent))
    path = os.path.abspath(target)  # noqa: PTH100 (links stay in __file__, as Python leaves them)
    module = sys.modules["__main__"]
    module.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _clear_main() -> None:
    """Empties ``__main__``. The module object stays: multiprocessing and pickle look it up by name."""
    module = sys.modules["__main__"]
    builtins = module.__dict__["__builtins__"]
    module.__dict__.clear()
    module.__dict__.update(
        __name__="__main__", __doc__=None, __package__=None, __loader__=None, __spec__=None, __builtins__=builtins
    )
    module.__annotations__ = {}


def _first_on_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path.insert(0, directory)


def _end_with(rank: int, report: int, error: BaseException) -> None:
    """Reports the error, then ends as Python would, but does not print the traceback: the agent puts it in the log."""
    error = exit_report.real_reason(error)
    own_page.complete()
    trace = exit_report.script_side(error, _user_side)
    error.__traceback__ = trace
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code:
            _report(report, exit_report.error_report(rank, error, trace, code & 0xFF))  # Python prints its message
        else:
            _end_page()
        raise error
    is_reported = _report(report, exit_report.error_report(rank, error, trace, 1))
    hook = _users_hook()
    if hook is not None:
        hook(type(error), error, trace)
    elif not is_reported:
        with contextlib.suppress(OSError):  # its standard error may be gone as well
            traceback.print_exception(error)
    sys.excepthook = lambda *_: None
    if isinstance(error, KeyboardInterrupt):
        raise error  # the interpreter ends itself by SIGINT, so that the shell knows
    sys.exit(1)


def _report_leaving(rank: int, report: int, error: BaseException) -> None:
    """Reports an exception that may not get as far as the end of the script."""
    if not isinstance(error, SystemExit):
        trace = exit_report.script_side(error, _user_side)
        _report(report, {"leaving": exit_report.error_report(rank, error, trace, 1)["error"]})


def _users_hook() -> Callable[..., object] | None:
    """The exception hook of the script, if it has one. torch.distributed wraps its own around whatever it finds."""
    hook = sys.excepthook
    while getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d":
        wrapped = inspect.getclosurevars(hook).nonlocals.get("old_hook")
        if wrapped is None:
            return None
        hook = wrapped
    return None if hook is sys.__excepthook__ else hook


def _user_side(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is neither phalanx's nor runpy's."""
    first = trace
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        if not (file.startswith(LAUNCHER) or file in ("<string>", "<frozen runpy>") or file == runpy.__file__):
            return first
        first = first.tb_next
    return None


def _report(fd: int, content: Mapping[str, object]) -> bool:
    """Writes a `RankReport`; returns False when the agent is gone, or the script has closed the pipe."""
    data = json.dumps(content).encode() + b"\n"
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True
