"""The status page of this process, which it has if ``phalanx run`` started it as a rank."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from phalanx import run_files
from phalanx.status import layout
from phalanx.status.layout import STACK_SIGNAL, stacks_path, status_path
from phalanx.status.page import StatusPage

_own: StatusPage | None = None
_switched_off: StatusPage | None = None
_stacks_fd = -1
_before_failing: list[Callable[[], None]] = []
_when_begun: list[Callable[[StatusPage], object]] = []


def begin(directory: Path, rank: int, world_size: int) -> None:
    """Creates the page of this process. Without room for it on the disk, training goes ahead without a page."""
    global _own, _stacks_fd
    try:
        _own = StatusPage(status_path(directory, rank), rank, world_size)
    except OSError:
        _own = None
        return
    with contextlib.suppress(OSError):
        fd = move_fd_up(run_files.open_file(stacks_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        # Only the main thread's stack: other threads may run while a signal handler reads theirs, and crash it. The
        # file stays open as long as the process.
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False)
        _stacks_fd = fd
    for call in _when_begun:
        call(_own)


def move_fd_up(fd: int) -> int:
    """Gives an open file a high number, and returns it.

    A script that closes everything from 3 on, as daemons do, reuses the low numbers, and we would write into its files.
    """
    import fcntl
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = 512 if limit == resource.RLIM_INFINITY else min(512, limit // 2)
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    except OSError:  # no high number is free
        return fd
    os.close(fd)
    return moved


def write_stacks() -> None:
    """Writes the stacks of all other threads to `stacks_path`, as faulthandler would, with the threads' names.

    The interpreter runs one thread at a time, so no stack changes while it is read.
    """
    if _stacks_fd >= 0:
        with contextlib.suppress(OSError):  # a full disk, or the script has closed our file
            os.write(_stacks_fd, stacks_of_threads().encode(errors="replace"))


def stacks_of_threads() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"Thread 0x{ident:016x} [{names.get(ident, '')}] (most recent call first):\n{_stack(frame)}\n"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def _stack(frame: FrameType | None) -> str:
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)


def when_begun(call: Callable[[StatusPage], object]) -> None:
    """Calls ``call`` with every page that this process, or one forked from it, begins."""
    _when_begun.append(call)
    if _own is not None:
        call(_own)


def before_failing(call: Callable[[], None]) -> None:
    """Calls ``call`` before a rank that fails ends."""
    _before_failing.append(call)


def complete() -> None:
    """Writes what else is known of this rank, which fails, for those who read the page afterwards."""
    for call in _before_failing:
        call()


def current() -> StatusPage | None:
    """Returns the page. None outside of ``phalanx run``, and in processes that a rank has started."""
    return _own


@contextlib.contextmanager
def waiting(op: int, kind: int | None = None, peer: int = layout.NO_PEER, size: int = 0) -> Iterator[None]:
    """Notes that this rank waits for another one outside of a collective."""
    page = _own
    if page is None:
        yield
        return
    entry = page.begin(layout.kind_of(layout.NO_GROUP, op, 0) if kind is None else kind, 0, size, peer=peer)
    started = time.perf_counter()
    blocks = page.block()
    failed = True
    try:
        yield
        failed = False
    finally:
        # Joining is not a part of the training.
        page.end(entry, 0.0 if op == layout.INIT_PROCESS_GROUP else time.perf_counter() - started, failed)
        if blocks:
            page.unblock()


@contextlib.contextmanager
def phase(number: int) -> Iterator[None]:
    """Notes a phase, and afterwards the one before it again."""
    page = _own
    if page is None:
        yield
        return
    before = page.enter(number)
    try:
        yield
    finally:
        page.enter(before)


def switch(on: bool) -> None:
    """Turns the page off or on again, to measure what it costs."""
    global _own, _switched_off
    if on != (_own is not None):
        _own, _switched_off = _switched_off, _own


def _forget() -> None:
    global _own
    _own = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
