"""Finds out what a rank does while others wait for it: a kind and a line of code, from its record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.status.rank_record import Child, RankRecord, Vitals
from phalanx.status.reading import CodeLine
from phalanx.status.stack_parser import Thread, main_thread
from phalanx.torch_compat.dataloader import WORKER_FILE

_SWAPPED = 16 << 20
_FAULTS = 20.0
_LOADER = ("torch/utils/data/dataloader.py",)

GPU_DRIVER = ("nv", "uvm", "os_acquire")
"""The beginnings of the names of functions in NVIDIA's kernel modules."""

# By the kernel function that it sleeps in, by the files of the innermost lines, or by the text of the user's line.
_BY_KERNEL = (
    ("sleeps", ("hrtimer_nanosleep", "do_nanosleep", "common_nsleep")),
    ("child", ("do_wait", "kernel_wait4")),
    ("input", ("tty_read", "n_tty_read")),
    ("network", ("inet_csk_", "sk_wait_", "tcp_", "unix_stream_", "wait_woken")),
    ("file lock", ("locks_lock_", "flock_lock_", "posix_lock_", "fcntl_setlk")),
    ("driver", GPU_DRIVER),
)
_BY_FILE = (
    ("child", ("/subprocess.py", "/multiprocessing/popen_fork.py", "/multiprocessing/process.py")),
    ("lock", ("/threading.py", "/queue.py", "/concurrent/futures/_base.py", "/concurrent/futures/thread.py")),
    ("queue", ("/multiprocessing/queues.py", "/multiprocessing/connection.py", "/multiprocessing/synchronize.py")),
    ("network", ("/socket.py", "/ssl.py", "/http/client.py", "/urllib/request.py")),
)
_BY_TEXT = (
    ("sleeps", re.compile(r"\bsleep\(")),
    ("input", re.compile(r"\binput\(|\bstdin\b")),
    ("file lock", re.compile(r"\b(flock|lockf)\(")),
    ("store", re.compile(r"store\w*\.(get|wait)\(", re.IGNORECASE)),
    (
        "lock",
        re.compile(
            r"lock|mutex|semaphore|condition|\.acquire\(|\.result\(|\.wait\(|\.join\(|queue\S*\.(get|put)\(",
            re.IGNORECASE,
        ),
    ),
)
# sqlite waits by sleeping and trying again, in a call of the database.
_ASKS_DATABASE = re.compile(r"\.(execute|executemany|executescript|commit)\(")


@dataclass(frozen=True)
class RankActivity:
    """The activity of one rank."""

    kind: str
    """ended, finished, stopped, traced, swapped, device, loader, computes, disk, driver, sleeps, child,
    input, lock, native lock, file lock, sqlite, store, queue, network, idle or unknown"""
    line: CodeLine | None = None
    """The innermost line of the user's code."""
    helper: Child | None = None
    """The process that it waits for, if that is known: a worker of the DataLoader, or a program."""
    holder: CodeLine | None = None
    """The line of the thread that probably holds the lock, or keeps a process that has finished."""
    handler: CodeLine | None = None
    """The line of a rank that has finished, if it is in an atexit handler or a destructor."""
    left: CodeLine | None = None
    """The line of the loop that it has left, and that the waiting ranks are in."""


def rank_activity(record: RankRecord, waiting: Sequence[RankRecord] = ()) -> RankActivity:
    """Returns what a rank does. ``waiting``: the ranks that wait for it."""
    if record.exit_code is not None:
        return RankActivity("ended")
    main = record.main
    line = main.shown if main else None
    left = next(filter(None, (has_left(record, other) for other in waiting)), None)
    kind = _by_kernel_alone(record.vitals) or ("finished" if record.status and record.status.phase == "done" else None)
    kind = kind or ("device" if record.device == "busy" else None)
    if kind is not None:
        if kind == "finished":
            handler = _at_exit(main)
            return RankActivity(kind, holder=None if handler else _holder(record.threads), handler=handler, left=left)
        return RankActivity(kind, line, left=left)
    if main is not None and _is_in_loader(main):
        return RankActivity("loader", line, helper=_stuck(record.children, of_loader=True), left=left)
    kind = _idle_kind(record, main)
    return RankActivity(
        kind,
        line,
        helper=_stuck(record.children, of_loader=False) if kind == "child" else None,
        holder=_holder(record.threads) if kind == "lock" else None,
        left=left,
    )


def _by_kernel_alone(vitals: Vitals | None) -> str | None:
    """Returns what keeps a process from running, whatever its code is."""
    if vitals is None:
        return "unknown"
    if vitals.state in ("T", "t"):
        return "stopped" if vitals.state == "T" else "traced"
    if vitals.swapped > _SWAPPED and vitals.faults > _FAULTS:
        return "swapped"
    return None


def _idle_kind(record: RankRecord, main: Thread | None) -> str:
    vitals = record.vitals
    assert vitals is not None
    if vitals.computes:
        return "computes"
    found = _by_kernel(vitals) or (_by_code(main) if main else None)
    if found == "sleeps" and main and main.lines and _ASKS_DATABASE.search(main.lines[0].source):
        return "sqlite"
    if found is not None:
        return found
    if vitals.state == "D" or vitals.waits_for_disk:
        return "disk"
    if vitals.waits_in.startswith("futex"):  # many things use it; Python's own locks are known by now
        return "native lock" if main is not None else "lock"
    return "idle" if main is not None else "unknown"


def _by_kernel(vitals: Vitals) -> str | None:
    return next((kind for kind, names in _BY_KERNEL if vitals.waits_in.startswith(names)), None)


def _by_code(main: Thread) -> str | None:
    if main.lines and not main.lines[0].is_users:
        # Only the innermost few lines show what it waits for; those further out have called them.
        inner = [line for line in main.lines[:4] if not line.is_users]
        for kind, files in _BY_FILE:
            if any(line.file.endswith(files) for line in inner):
                return kind
    text = main.shown.source if main.shown else ""
    return next((kind for kind, pattern in _BY_TEXT if pattern.search(text)), None)


# ---- other processes and threads


def _is_in_loader(main: Thread) -> bool:
    """True if it waits for a batch of the loader's processes: no line of the user's is inside of the loader."""
    for line in main.lines:
        if line.is_users:
            return False
        if line.file.endswith(_LOADER):
            return True
    return False


def _stuck(children: Sequence[Child], of_loader: bool) -> Child | None:
    """Returns the process that is waited for. An idle worker of a loader is in no line of the user's."""
    if not of_loader:
        return children[-1] if children else None
    workers = [child for child in children if any(map(_is_loader_worker, child.threads))]
    stuck = [child for child in workers if _line_within_worker(child) is not None]
    stopped = [child for child in workers if child.vitals.state in "Tt"]
    return next(iter(stopped or stuck or workers or children), None)


def _is_loader_worker(thread: Thread) -> bool:
    return any(line.file.endswith(WORKER_FILE) for line in thread.lines)


def _line_within_worker(child: Child) -> CodeLine | None:
    """Returns the user's line that a loader's worker is in; those further out are from before the fork."""
    main = main_thread(child.threads)
    for line in main.lines if main else ():
        if line.file.endswith(WORKER_FILE):
            return None
        if line.is_users:
            return line
    return None


def helper_line(child: Child) -> CodeLine | None:
    """Returns the line of a process that a rank waits for, if it is Python."""
    main = main_thread(child.threads)
    if main is None:
        return None
    return _line_within_worker(child) if _is_loader_worker(main) else main.shown


def _at_exit(main: Thread | None) -> CodeLine | None:
    """Returns the line of an atexit handler, or of a destructor, that the main thread is in after the script's end.

    Python waits for the other threads in threading._shutdown; handlers are called by no other line of Python.
    """
    # If the main thread is in no line of Python, another one is taken for it, which began in _bootstrap.
    if main is None or not main.lines or main.lines[-1].function in ("_shutdown", "<module>", "_bootstrap"):
        return None
    return next(iter(main.users), main.lines[-1])


def _holder(threads: Sequence[Thread]) -> CodeLine | None:
    """Returns the line of the thread that may hold the lock or keep the process: another one in the user's code."""
    return next((thread.shown for thread in threads if not thread.is_main and thread.users), None)


# ---- loops


def has_left(record: RankRecord, other: RankRecord) -> CodeLine | None:
    """Returns the line of a loop that ``other`` is in and this rank has left: it is further down in the function."""
    ours, theirs = record.main, other.main
    if ours is None or theirs is None:
        return None
    inward = list(reversed(theirs.users))
    for depth, (own, their) in enumerate(zip(reversed(ours.users), inward, strict=False)):
        if (own.file, own.function) != (their.file, their.function):
            return None
        if own.line == their.line:
            continue
        if own.line < their.line:
            return None  # or in the next round of a loop around both
        within = [(first, last) for first, last in their.loops if own.line > last]
        if within:
            return CodeLine(their.file, within[0][0], their.function)
        return next(
            (CodeLine(line.file, line.loops[0][0], line.function) for line in inward[depth + 1 :] if line.loops), None
        )
    return None
