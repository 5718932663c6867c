"""``phalanx.spawn``: a function on several processes, with the contract of torch.multiprocessing.spawn.

The processes are forked from a zygote, as under ``phalanx run``; they write to the caller's own standard streams.
They find RANK and WORLD_SIZE in their environment, so `phalanx.init` works in the function without arguments.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from phalanx import entry_point
from phalanx.argparser import shown, whole_number
from phalanx.errors import UsageError
from phalanx.events import Ending
from phalanx.failure.root_cause import find_cause
from phalanx.fd_channel import anonymous_file
from phalanx.launch.spec.launch_spec import (
    LaunchSpec,
    Placement,
    Program,
    WorkerSpec,
    check_processes,
    placements,
    worker_environment,
)
from phalanx.status import notices
from phalanx.system import ports, require_linux

if TYPE_CHECKING:
    from phalanx.launch.process.zygote_client import ZygoteClient

_GRACE = 10.0
# mp.spawn sets none of these. A function may choose its own master, or inherit its parent's choice, and one that asks
# whether torchrun has started it must get the right answer.
_NOT_BY_SPAWN = (
    *("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    "TORCHELASTIC_USE_AGENT_STORE",
)


def spawn(
    fn: Callable[..., object],
    args: tuple[object, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Runs ``fn(rank, *args)`` in ``nprocs`` new processes.

    With ``join`` it returns when all have ended, and raises torch.multiprocessing's ProcessRaisedException or
    ProcessExitedException for the rank that failed first, with its traceback. Without, it returns a context with
    ``join(timeout, grace_period)`` and ``pids()``. Works from a script's main module and from a notebook.
    """
    require_linux("phalanx.spawn")
    if start_method != "spawn":
        raise UsageError(f"start_method is {start_method!r}; phalanx.spawn starts clean processes only ('spawn').")
    if not callable(fn):
        raise UsageError(f"fn is {shown(fn)}, which cannot be called; give a function of the rank.")
    if not isinstance(args, Iterable):
        raise UsageError(f"args is {shown(args)}; give a tuple of what the function takes after the rank.")
    nprocs = check_processes(whole_number("nprocs", nprocs), "nprocs")
    context = SpawnContext(fn, tuple(args), nprocs, daemon)
    if not join:
        return context
    try:
        while not context.join():
            pass
    except KeyboardInterrupt:
        context.interrupt()
        raise
    finally:
        context.close()
    return None


class SpawnContext:
    """The running processes of one `spawn`."""

    def __init__(
        self,
        fn: Callable[..., object],
        args: tuple[object, ...],
        nprocs: int,
        daemon: bool,
        zygote: ZygoteClient | None = None,
    ) -> None:
        """``zygote``: one that runs already and stays; by default a new one, for this call alone."""
        # These cannot be imported on Windows.
        from phalanx.launch.agent.attempt_run import AttemptRun
        from phalanx.launch.process import pickled_function as functions

        program = Program("function", getattr(fn, "__qualname__", repr(fn)))
        spec = LaunchSpec(program, nproc_per_node=nprocs)
        pickled, fds = functions.pack(fn, args, daemon)
        self._filled = entry_point.open_closed_streams()
        self._own_zygote = zygote is None
        self._zygote = zygote or new_zygote()
        self._selector = selectors.DefaultSelector()
        self._attempt = AttemptRun(self._zygote, self._selector, _GRACE, notices.give)
        self._open = True
        try:
            self._zygote.fresh_store()
            for place in placements([nprocs]):
                self._start(spec, place, pickled, fds)
            while not all(rank.pid or rank.exited for rank in self._attempt.ranks.values()):
                self._attempt.turn(None)
        except BaseException:
            self.close()
            raise
        # As with multiprocessing: at the parent's exit, daemons are ended and others are waited for.
        self._at_exit = self.close if daemon else self._join_at_exit
        atexit.register(self._at_exit)

    def _start(self, spec: LaunchSpec, place: Placement, pickled: bytes, fds: list[int]) -> None:
        from phalanx.launch.agent.rank_process import RankProcess

        assert self._zygote.address is not None
        environment = worker_environment(os.environ, spec, place, self._zygote.address, 0, "spawn")
        for name in _NOT_BY_SPAWN:
            environment.pop(name, None)
            if name in os.environ and name != "TORCHELASTIC_USE_AGENT_STORE":
                environment[name] = os.environ[name]
        file = anonymous_file("function")
        try:
            os.write(file, pickled)
            worker = WorkerSpec(place.rank, place.local_rank, spec.program, environment)
            self._attempt.start(RankProcess(place), worker, [file, *fds])
        finally:
            os.close(file)

    def pids(self) -> list[int]:
        return [rank.pid or 0 for rank in self._attempt.ranks.values()]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True when all processes have ended well, False when the timeout passed; raises if one of them failed.

        After a failure the others get SIGTERM, and SIGKILL after ``grace_period`` seconds.
        """
        if not self._open:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._attempt.all_exited:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            was_stopping = self._attempt.is_stopping
            self._attempt.turn(left)
            if grace_period is not None and self._attempt.is_stopping and not was_stopping:
                self._attempt.stop(signal.SIGTERM, timeout=grace_period)
        endings = self._attempt.endings()
        self.close()
        if any(ending.failed for ending in endings):
            _raise(find_cause(endings).cause)
        return True

    def interrupt(self) -> None:
        """Passes a Ctrl-C on, as a shared terminal would, and waits for the processes to end."""
        self._attempt.stop(signal.SIGINT)
        while not self._attempt.all_exited:
            self._attempt.turn(None)

    def close(self) -> None:
        """Ends whatever still runs, and the helpers."""
        if not self._open:
            return
        self._open = False
        if hasattr(self, "_at_exit"):
            atexit.unregister(self._at_exit)
        if self._own_zygote:
            self._zygote.close()
        else:
            self._attempt.abandon()
        self._attempt.close()
        self._selector.close()
        for fd in self._filled:
            os.close(fd)

    def _join_at_exit(self) -> None:
        if self._open:
            self.join()


def new_zygote(late: Sequence[str] = ()) -> ZygoteClient:
    """``late``: modules that it imports beside torch."""
    from phalanx.launch.process.zygote_client import ZygoteClient

    with contextlib.closing(ports.listen(ports.LOOPBACK, 0)) as listener:
        return ZygoteClient(os.environ, listener=listener, late=late)


def _raise(cause: Ending) -> None:
    """Raises mp.spawn's own exceptions, so that code which catches them keeps working."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    if cause.error is not None and cause.error.type != "SystemExit":
        text = f"\n\n-- Process {cause.rank} terminated with the following error:\n{cause.error.traceback}"
        raise ProcessRaisedException(text, cause.rank, cause.pid)
    if cause.signal is not None:
        name = signal.Signals(cause.signal).name
        raise ProcessExitedException(
            f"process {cause.rank} terminated with signal {name}", cause.rank, cause.pid, -cause.signal, name
        )
    raise ProcessExitedException(
        f"process {cause.rank} terminated with exit code {cause.status}", cause.rank, cause.pid, cause.status
    )
