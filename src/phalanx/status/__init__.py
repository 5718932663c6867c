"""A page of memory in which each rank writes what it is doing. It can be read from outside, even after its death.

``rank-N.status`` in the run directory, mapped by the rank. `layout` says what stands where, `page` writes, `reading`
reads; `windows` does both, for the pace of the last steps. `own` is the page of this process, if ``phalanx run``
started it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx import run_files
from phalanx.status import layout
from phalanx.status.layout import PHASES, stacks_path, status_path
from phalanx.status.page import StatusPage
from phalanx.status.stacks import text_of_stacks
from phalanx.status.windows import Window, windows

if TYPE_CHECKING:
    from phalanx.status.reading import CodeLine, Collective, Group, Status, ask, ask_stacks, pulse, read

__all__ = [
    "PHASES",
    "STACK_SIGNAL",
    "CodeLine",
    "Collective",
    "Group",
    "Status",
    "StatusPage",
    "Window",
    "ask",
    "ask_stacks",
    "begin",
    "complete",
    "out_of_the_way",
    "own",
    "phase",
    "pulse",
    "read",
    "record",
    "stacks_path",
    "status_path",
    "waiting",
    "when_begun",
    "when_failing",
    "windows",
    "write_stacks",
]

STACK_SIGNAL = int(signal.SIGRTMIN) + 7 if hasattr(signal, "SIGRTMIN") else 0  # there is none without real-time signals
"""Makes a rank write the Python stack of its main thread to `stacks_path`, whatever it is blocked in."""
_own: StatusPage | None = None
_put_aside: StatusPage | None = None
_stacks = -1
_completions: list[Callable[[], None]] = []
_when_begun: list[Callable[[StatusPage], None]] = []


def __getattr__(name: str) -> Any:
    """The readers. A rank that only writes its page imports nothing but the standard library before its script."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phalanx.status import reading

    return getattr(reading, name)


def begin(directory: Path, rank: int, world_size: int) -> None:
    """From now on this process has a page. A disk without room for it is no reason not to train."""
    global _own, _stacks
    try:
        _own = StatusPage(status_path(directory, rank), rank, world_size)
    except OSError:
        _own = None
        return
    with contextlib.suppress(OSError):
        fd = out_of_the_way(run_files.open_file(stacks_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        # Not of all threads: others may run on while a signal handler reads their stacks, and crash it. The file stays
        # open as long as the process.
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False)
        _stacks = fd
    for call in _when_begun:
        call(_own)


def out_of_the_way(fd: int) -> int:
    """The same file with a high number: a script that closes everything from 3 on, as daemons do, gets the low ones for
    its own files, and we would write into them."""
    import fcntl
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = 512 if limit == resource.RLIM_INFINITY else min(512, limit // 2)
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    except OSError:  # no number is left up there
        return fd
    os.close(fd)
    return moved


def write_stacks() -> None:
    """The same for all threads, from a thread that has the interpreter to itself."""
    if _stacks >= 0:
        with contextlib.suppress(OSError):  # a full disk, or the script has closed what is not its own
            os.write(_stacks, text_of_stacks().encode(errors="replace"))


def when_begun(call: Callable[[StatusPage], None]) -> None:
    """Calls it with every page that this process, or one forked from it, begins."""
    _when_begun.append(call)
    if _own is not None:
        call(_own)


def complete() -> None:
    """This rank fails: what else is known of it is written into the page, for those who read it afterwards."""
    for call in _completions:
        call()


def when_failing(call: Callable[[], None]) -> None:
    """Calls it before a rank that fails ends."""
    _completions.append(call)


def own() -> StatusPage | None:
    """None outside of ``phalanx run``, and in processes that a rank has started."""
    return _own


@contextlib.contextmanager
def waiting(op: int, kind: int | None = None, peer: int = layout.NO_PEER, size: int = 0) -> Iterator[None]:
    """While this rank waits for another one otherwise than in a collective."""
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
    """In this phase for a while, and then in the one before."""
    page = _own
    if page is None:
        yield
        return
    before = page.enter(number)
    try:
        yield
    finally:
        page.enter(before)


def record(on: bool) -> None:
    """Off, this rank has no page, until it is turned on again. For measuring what the page costs."""
    global _own, _put_aside
    if on != (_own is not None):
        _own, _put_aside = _put_aside, _own


def _forget() -> None:
    global _own
    _own = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
