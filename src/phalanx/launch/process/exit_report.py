"""The report of a rank whose script was ended by an exception, and what must not disturb its end.

Nothing of it costs anything before. torch is asked only if the script has imported it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

from phalanx.failure.missing_gradients import missing_gradients
from phalanx.source_lines import is_users, program_package, shorten_path
from phalanx.torch_compat import dataloader
from phalanx.torch_compat.nn import DDP_LOGGING_DATA

_LONGEST_TRACEBACK, _LONGEST_MESSAGE, _LONGEST_LINE = 30_000, 4_000, 1_000
_LOADER_SECONDS = 1.0
_MOST_DEATHS = 100
"""Thread deaths that are reported: some programs lose a thread every second, for days."""
_NO_CUDA = re.compile(
    r"not compiled with CUDA|no attribute '_cuda_|requires CUDA support|without ATen_cuda|No CUDA GPUs are available"
    r"|no NVIDIA driver|accelerator device when none"
)


def ignore_loader_sigchld() -> None:
    """Turns off torch's handler of SIGCHLD; the first thing to do when a script has failed.

    It reports a killed DataLoader worker by raising wherever Python happens to be, such as in the middle of our report.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if dataloader.is_handler_of_loaders(handler):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def ignore_interrupts() -> None:
    """Ignores Ctrl-C in a script that has failed and is ending; after SIGINT the agent sends SIGTERM.

    By a handler and not by SIG_IGN, which processes that the script starts at its exit would inherit.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: None)


def report_thread_deaths(report: Callable[[Mapping[str, str]], object]) -> None:
    """Reports exceptions that end threads beside the main one, which may wait for them from then on.

    Python prints them as ever.
    """
    plain = threading.excepthook
    numbers = iter(range(_MOST_DEATHS))

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit and next(numbers, None) is not None:
            report(_death(args))
        plain(args)

    threading.excepthook = hook


def _death(args: threading.ExceptHookArgs) -> dict[str, str]:
    """The fields of an `events.ThreadDeath`."""
    lines = [line for line in traceback.extract_tb(args.exc_traceback) if is_users(line.filename, program_package())]
    message = (_message(args.exc_value).strip().splitlines() or [""])[0]
    return {
        "name": args.thread.name if args.thread is not None else "",
        "error": f"{args.exc_type.__name__}: {message[:200]}" if message else args.exc_type.__name__,
        "place": f"{shorten_path(lines[-1].filename)}:{lines[-1].lineno}" if lines else "",
    }


def _message(error: BaseException | None) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (an exception's own __str__ may fail; that must not hide it)
        return "(its message cannot be shown)"


def error_report(rank: int, error: BaseException, trace: TracebackType | None, exit_code: int) -> dict[str, object]:
    """The fields of a `RankReport` with an `ErrorRecord`, for the exception that ended a script."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    text = "".join(traceback.format_exception(kind, error, trace))
    summary = traceback.extract_tb(trace)
    frames = [_frame(each.filename, each.lineno, each.name, each.line) for each in summary]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(_frame(error.filename, error.lineno, "<module>", error.text))
    record = {
        "rank": rank,
        "pid": os.getpid(),
        "time": time.time(),
        "type": name,
        "message": _shortened(_message(error)),
        "frames": (*frames[:1], *frames[1:][-19:]),  # the first one shows where the program is
        "traceback": text[-_LONGEST_TRACEBACK:],
        "exit_code": exit_code,
        "note": note(error, trace),
    }
    return {"error": record}


def _frame(file: str, line: int | None, function: str, source: str | None) -> dict[str, object]:
    return {"file": file, "line": line or 0, "function": function, "source": (source or "").strip()[:_LONGEST_LINE]}


def _shortened(message: str) -> str:
    """Keeps the beginning and the end: torch puts whole tracebacks of other processes into messages."""
    half = _LONGEST_MESSAGE // 2
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:half]}\n…\n{message[-half:]}"


def script_side(
    error: BaseException, user_side: Callable[[TracebackType | None], TracebackType | None]
) -> TracebackType | None:
    """The traceback of the script, also if torch's handler of SIGCHLD has raised after the script was over.

    It may raise in any frame of ours, and in one of the standard library that ours have called.
    """
    trace = user_side(error.__traceback__)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    is_late = not files or (
        dataloader.is_in_handler(files[-1]) and not any(is_users(f, program_package()) for f in files)
    )
    return user_side(error.__context__.__traceback__) if is_late and error.__context__ is not None else trace


def real_reason(error: BaseException) -> BaseException:
    """Returns ``error``, or its cause: a killed worker of a DataLoader.

    When torch noticed that too late, or in a destructor, there is only a pipe that has lost its other end.
    """
    is_vague = type(error) is RuntimeError and "exited unexpectedly" in str(error)
    reason = _killed_loader(error) if is_vague or isinstance(error, ConnectionError | EOFError) else None
    if reason is None:
        return error
    reason.__context__ = error
    return reason.with_traceback(error.__traceback__)


def _killed_loader(error: BaseException) -> RuntimeError | None:
    """Returns the error that torch raises when it notices in time; None if no worker was killed."""
    from multiprocessing import connection

    iterator = _owner(error.__traceback__, dataloader.ITERATOR.if_loaded())
    workers = {} if iterator is None else {worker.sentinel: worker for worker in dataloader.workers_of(iterator)}
    for sentinel in connection.wait(list(workers), _LOADER_SECONDS):  # a process closes its pipes before it is dead
        worker = workers[sentinel]
        worker.join()
        if worker.exitcode < 0:
            killer = signal.strsignal(-worker.exitcode)
            return RuntimeError(f"DataLoader worker (pid {worker.pid}) is killed by signal: {killer}. ")
    return None


def note(error: BaseException, trace: TracebackType | None) -> str:
    """An explanation beyond the exception's own message; empty when there is none."""
    try:
        return _about_gradients(error, trace) or _about_cuda(error, trace)
    except Exception:  # noqa: BLE001 (objects of the script are used; what they raise must not hide the error)
        return ""


def _about_gradients(error: BaseException, trace: TracebackType | None) -> str:
    module = sys.modules.get("torch.nn.parallel.distributed")
    wrapper = _owner(trace, getattr(module, "DistributedDataParallel", None))
    if wrapper is None or not isinstance(error, RuntimeError):
        return ""
    names = _parameter_names(wrapper)
    switch = "find_unused_parameters"
    return missing_gradients(str(error), names, wrapper.find_unused_parameters, "DistributedDataParallel", switch) or ""


def _about_cuda(error: BaseException, trace: TracebackType | None) -> str:
    """Names the device that was asked for, and the build if it is the reason; torch's message does not always."""
    if "torch" not in sys.modules or not _NO_CUDA.search(str(error)):
        return ""
    from phalanx.devices import accelerator

    if (built := accelerator.built_for()) == accelerator.kind() == "cuda":
        return ""
    fact = "torch sees no GPU" if built == "cuda" else f"this torch has no CUDA{f', but {built}' if built else ''}"
    program = program_package()
    frames = [frame for frame, _ in traceback.walk_tb(trace) if is_users(frame.f_code.co_filename, program)]
    lines = [line for line in traceback.extract_tb(trace) if is_users(line.filename, program)]
    return f"{fact}; the script asks for {_device(frames[-1], lines[-1].line or '') if frames else 'cuda'}"


def _device(frame: FrameType, text: str) -> str:
    """The CUDA device in a line of the script: written there, or the value of a name or of a plain attribute."""
    written = re.search(r"cuda:\d+", text)
    if written:
        return written[0]
    for name, attribute in re.findall(r"([A-Za-z_]\w*)(?:\.(\w+))?", text):
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        found = getattr(value, "__dict__", {}).get(attribute) if attribute else value
        for each in (found, value):
            if re.fullmatch(r"cuda(:\d+)?", str(each) if type(each).__name__ in ("device", "str") else ""):
                return str(each)
    return "cuda"


def _owner(trace: TracebackType | None, kind: type | None) -> Any:
    """The innermost object of this class in whose methods the exception was raised."""
    found = None
    while kind is not None and trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, kind):
            found = owner
        trace = trace.tb_next
    return found


def _parameter_names(wrapper: Any) -> list[str]:
    """The names in the order in which DDP numbers them; none when that cannot be known any more."""
    ignored = wrapper.parameters_to_ignore
    named = [(name, each) for name, each in wrapper.module.named_parameters() if name not in ignored]
    logged = DDP_LOGGING_DATA.get()
    count = None if logged is None else logged(wrapper).get("num_parameter_tensors")
    # DDP numbers what required a gradient when it wrapped the model. Freezing or unfreezing since then shifts that.
    for names in ([name for name, each in named if each.requires_grad], [name for name, _ in named]):
        if len(names) == count:
            return names
    return []
