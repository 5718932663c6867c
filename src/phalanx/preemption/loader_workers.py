"""Workers of a DataLoader, and other helpers that a rank starts through multiprocessing, outlive a scheduler's signal.

A scheduler may signal every process of a job. torch lets SIGTERM kill a loader's worker, and then raises in the rank,
in the middle of the checkpoint that the signal was meant to cause. Here the rank decides when its helpers end.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver, get_start_method, resource_tracker, util
from typing import Any

from phalanx.native import library
from phalanx.preemption.handlers import SCHEDULER_SIGNALS
from phalanx.status import notices
from phalanx.torch_compat.dataloader import SET_WORKER_SIGNALS, START_WORKERS, WORKER_LOOP, after_worker_signals

_FORKSERVER_GUARD = "phalanx.preemption.forkserver_guard"
_torch_worker_loop = WORKER_LOOP.get()


def install() -> None:
    """In a rank, or in the process that ranks are forked from. Without the C library helpers end as torch's do."""
    if library.why_not() is not None:
        START_WORKERS.wrap(_with_notice)
    elif SET_WORKER_SIGNALS.get() and WORKER_LOOP.wrap(lambda _: worker_loop):
        START_WORKERS.wrap(_with_signals_blocked)
        util.register_after_fork(_owner, _guard_helper)


def _with_notice(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: object, *args: object, **kwargs: object) -> None:
        if sys.platform == "linux":  # elsewhere there is no such library, and no scheduler
            notices.give(f"a scheduler's signal ends the workers of a DataLoader: {library.why_not()}")
        plain(self, *args, **kwargs)

    return init


class _Owner:
    """multiprocessing calls what is registered as long as its owner lives."""


_owner = _Owner()


def _guard_helper(_: _Owner) -> None:
    """In a forked helper. Handlers that it has inherited from its rank stay."""
    library.library().phx_obey_own_session(False)


def _with_signals_blocked(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: object, loader: Any, *args: object, **kwargs: object) -> None:
        context = loader.multiprocessing_context
        method = context.get_start_method() if context is not None else get_start_method()
        if method != "fork":
            resource_tracker.ensure_running()  # its start unblocks SIGTERM
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULER_SIGNALS)  # inherited until a worker is ready
        try:
            if method == "forkserver":
                _start_forkserver()
            plain(self, loader, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return init


def _start_forkserver() -> None:
    """The server that forks the workers is guarded too. One that runs already stays as it is."""
    preloaded = getattr(forkserver._forkserver, "_preload_modules", ["__main__"])
    if _FORKSERVER_GUARD not in preloaded:
        forkserver.set_forkserver_preload([*preloaded, _FORKSERVER_GUARD])
    forkserver.ensure_running()


def worker_loop(*args: object) -> None:
    """Runs torch's loop in a worker of any start method, with the guard installed after torch's own handlers."""
    after_worker_signals(_guard_worker)
    _torch_worker_loop(*args)


def _guard_worker() -> None:
    library.library().phx_obey_own_session(True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SCHEDULER_SIGNALS)
