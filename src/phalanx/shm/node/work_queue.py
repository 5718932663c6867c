"""One collective of a group after the other, whichever threads ask for them, and what an asynchronous one returns.

A synchronous call runs in the thread that makes it; an asynchronous one in the lane's own thread. What a finished
collective calls back runs before the next collective starts, and collectives that it asks for run at once, in the
same thread. So their order is the same on every rank, and a callback that waits for one (PowerSGD's does) cannot
wait for itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from phalanx import status
from phalanx.errors import UsageError
from phalanx.native import library
from phalanx.status import StatusPage
from phalanx.status.layout import NO_PEER

_NO_LIMIT = timedelta(0)
# Frames at the top of the stack when a collective begins: of the page, the lane and the group, of torch.distributed's
# function and of the logging around it. To look at one costs a tenth of a microsecond.
_OWN_FRAMES = 5

# DDP's join hands a work to C++, which keeps its C++ half only; without its Python half it can neither be waited for
# nor give its future. So the latest ones are kept, if what they hold is small: join's has one element.
_KEPT = 256
_SMALL = 64


class _Raised:
    """An exception as the value of a future; see `Work.get_future`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _value_or_raise(future: Future[Any]) -> Any:
    global _last_raised
    value = future.value()
    if isinstance(value, _Raised):
        _last_raised = value.error
        raise value.error
    return value


_last_raised: BaseException | None = None


def original_error(error: RuntimeError) -> BaseException | None:
    """Our own exception, if C++ has made a RuntimeError with its text of it on the way."""
    return _last_raised if _last_raised is not None and str(_last_raised) in str(error) else None


class Work(dist.Work):
    """An asynchronous collective."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self._result = result
        self._error: BaseException | None = None
        self._ender: int | None = None
        self._pending = threading.Lock()
        self._pending.acquire()  # until it has ended; waiting for a lock can be interrupted by a signal
        self._base: Future[Any] = Future()
        self._future: Future[Any] | None = None

    def end(self, error: BaseException | None) -> None:
        """Called once, by the lane. Runs what hangs on the future."""
        self._error = error
        self._ender = threading.get_ident()
        # The error goes in as a value: Future.set_exception is seen by Python alone, and DDP's C++ would go on as if
        # nothing had happened.
        try:
            self._base.set_result(self._result if error is None else _Raised(error))
        finally:
            self._pending.release()  # last: who has waited may rely on the future, as DDP's C++ does

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        limit = timeout.total_seconds()
        if self._ender == threading.get_ident():
            pass  # one of its own callbacks
        elif self._pending.locked():
            self._wait(limit if limit > 0 else -1)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, limit: float) -> None:
        page = status.own()
        blocks = page is not None and page.block()
        try:
            if not self._pending.acquire(timeout=limit):
                raise TimeoutError(f"a collective has not ended within {limit:g} s.")
            self._pending.release()
        finally:
            if page is not None and blocks:
                page.unblock()

    def get_future(self) -> Future[Any]:
        # An exception that leaves a callback is seen by C++ too, so the future handed out is one step further.
        if self._future is None:
            self._future = self._base.then(_value_or_raise)
        return self._future

    def is_completed(self) -> bool:
        return not self._pending.locked()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()


class Finished(dist.Work):
    """What a synchronous call returns: there is nothing to wait for. One serves all calls; making one takes longer
    than a short collective."""

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        raise UsageError("a synchronous collective has no future; ask for one with async_op=True.")

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class WorkQueue:
    """The order of a group's collectives."""

    def __init__(self, name: str, page: StatusPage | None, log: library.Log | None = None) -> None:
        """``log``: by which the C library writes into the page what it runs; without one, it is done here."""
        self._name, self.page, self.log = name, page, log
        self._number = 0
        """Of the last collective that was asked for."""
        self._turn = threading.RLock()
        self._running = False
        self._calling_back: int | None = None
        """The thread that holds the turn and runs callbacks."""
        self._queue: deque[tuple[Callable[[], None], Work, int]] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._recent: deque[Work] = deque(maxlen=_KEPT)
        self.closed: str | None = None
        self.count = 0
        """Of the collectives so far."""
        self.seconds = 0.0
        """That they have taken, with the waiting for other ranks."""

    def now(self, kind: int, size: int, run: Callable[..., None], *arguments: Any) -> None:
        """Runs it in this thread, after everything that was asked for before. ``kind`` and ``size``: for the page."""
        self._number = number = self._number + 1
        page, log, entry = self.page, self.log, 0
        if page is not None and log is None:
            entry = page.begin(kind, number, size, True, NO_PEER, _OWN_FRAMES)
        with self._turn:
            if self._queue and self._calling_back is None:
                self._catch_up()
            if page is not None and log is not None:
                entry = page.announce(log, kind, number, size, _OWN_FRAMES)
            self._run(entry, run, *arguments)

    def later(self, kind: int, size: int, run: Callable[[], None], result: list[Tensor]) -> Work:
        """Runs it in the lane's thread."""
        self._number = number = self._number + 1
        entry = 0 if self.page is None else self.page.begin(kind, number, size, False, NO_PEER, _OWN_FRAMES)
        work = Work(result)
        if sum(tensor.numel() for tensor in result) <= _SMALL:
            self._recent.append(work)
        if self._calling_back == threading.get_ident():
            self._perform(run, work, entry)
            return work
        if self._thread is None:
            self._start()
        self._queue.append((run, work, entry))
        self._wake.put(True)
        return work

    def close(self, reason: str) -> None:
        """Ends the thread when what was asked for is done; further calls raise."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake.put(False)
            self._thread.join()
        with self._turn:
            self.closed = reason

    def _start(self) -> None:
        with self._turn:
            if self._thread is None:
                self._thread = threading.Thread(target=self._live, name=f"phalanx-shm-{self._name}", daemon=True)
                self._thread.start()

    def _live(self) -> None:
        # A new thread has as many threads for its arithmetic as there are cores until torch is asked. What a callback
        # computes would then differ in its last bit from what another rank computes in its main thread.
        torch.get_num_threads()
        while self._wake.get():
            with self._turn:
                if self._queue:  # a synchronous call may have caught up already
                    self._perform(*self._queue.popleft())

    def _catch_up(self) -> None:
        while self._queue:
            self._perform(*self._queue.popleft())

    def _perform(self, run: Callable[[], None], work: Work, entry: int) -> None:
        error = None
        if self.log is not None:
            self.log.record = entry
        elif self.page is not None:
            self.page.start(entry)
        try:
            self._run(entry, run)
        except Exception as raised:  # noqa: BLE001 (whoever waits for the work raises it)
            error = raised
        except BaseException as raised:  # a signal's: it is also this thread's own
            work.end(raised)
            raise
        before, self._calling_back = self._calling_back, threading.get_ident()
        try:
            work.end(error)
        finally:
            self._calling_back = before

    def _run(self, entry: int, run: Callable[..., None], *arguments: Any) -> None:
        if self.closed:
            raise UsageError(self.closed)
        if self._running:
            raise UsageError("a signal handler called a collective while its group was in the middle of another.")
        self._running = has_failed = True
        started = time.perf_counter()
        try:
            run(*arguments)
            has_failed = False
        finally:
            self._running = False
            self.count += 1
            seconds = time.perf_counter() - started
            self.seconds += seconds
            if self.page is not None and (self.log is None or has_failed):
                self.page.end(entry, seconds, has_failed)
