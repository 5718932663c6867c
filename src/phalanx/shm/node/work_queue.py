"""Runs the collectives of a group one after the other, whichever threads start them.

A synchronous call runs in the thread that makes it, an asynchronous one in the thread of the queue. The callbacks of a
finished collective run before the next collective starts, and collectives that they start run at once, in the same
thread. So the order is the same on every rank, and a callback that waits for a collective (PowerSGD's does) cannot
wait for itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from phalanx.errors import UsageError
from phalanx.native import library
from phalanx.status import own_page
from phalanx.status.layout import NO_PEER
from phalanx.status.page import StatusPage

_NO_LIMIT = timedelta(0)
_OWN_FRAMES = 5
"""Frames above the user's when a collective begins: the page, the queue, the group, torch.distributed's function and
its logging. Looking at one costs a tenth of a microsecond."""

# DDP's join gives a work to C++, which keeps only the C++ half; without the Python half there is no wait and no future.
# So the latest works are kept here if their results are small: that of join has one element.
_KEPT = 256
_SMALL = 64


class _Raised:
    """An exception as the value of a future; see `Work.get_future`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _value_or_raise(future: Future[list[Tensor] | _Raised]) -> list[Tensor]:
    global _last_raised
    value = future.value()
    if isinstance(value, _Raised):
        _last_raised = value.error
        raise value.error
    return value


_last_raised: BaseException | None = None


def original_error(error: RuntimeError) -> BaseException | None:
    """Returns the exception that C++ has turned into this RuntimeError, known by its text."""
    return _last_raised if _last_raised is not None and str(_last_raised) in str(error) else None


class Work(dist.Work):
    """An asynchronous collective."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self._result = result
        self._error: BaseException | None = None
        self._ender: int | None = None
        self._pending = threading.Lock()
        self._pending.acquire()  # until the end; a signal can interrupt a wait for a lock
        self._base: Future[list[Tensor] | _Raised] = Future()
        self._future: Future[list[Tensor]] | None = None

    def end(self, error: BaseException | None) -> None:
        """Ends the work, once, and runs the callbacks of its future."""
        self._error = error
        self._ender = threading.get_ident()
        # The error is set as a value: only Python sees Future.set_exception, and DDP's C++ would continue without it.
        try:
            self._base.set_result(self._result if error is None else _Raised(error))
        finally:
            self._pending.release()  # last: DDP's C++ reads the future after waiting

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
        page = own_page.current()
        blocks = page is not None and page.block()
        try:
            if not self._pending.acquire(timeout=limit):
                raise TimeoutError(f"a collective has not ended within {limit:g} s.")
            self._pending.release()
        finally:
            if page is not None and blocks:
                page.unblock()

    def get_future(self) -> Future[list[Tensor]]:
        # C++ does see the exception of a callback, so this future is that of a callback that raises it.
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
    """The work of a synchronous call. One serves all calls: making one takes longer than a short collective."""

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        raise UsageError("a synchronous collective has no future; ask for one with async_op=True.")

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class WorkQueue:
    """The collectives of one group, in order."""

    def __init__(self, name: str, page: StatusPage | None, log: library.Log | None = None) -> None:
        """``log``: the C library writes to the page by it; without one, the queue does."""
        self._name, self.page, self.log = name, page, log
        self.number = 0
        """Number of the last collective that was started."""
        self._turn = threading.RLock()
        self._running = False
        self._calling_back: int | None = None
        """Thread that runs callbacks now."""
        self._queue: deque[tuple[Callable[[], None], Work, int]] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._recent: deque[Work] = deque(maxlen=_KEPT)
        self.closed: str | None = None
        self.count = 0
        """Number of finished collectives."""
        self.seconds = 0.0
        """Seconds that they took, with the waiting for other ranks."""

    def now(self, kind: int, size: int, run: Callable[..., None], *arguments: object) -> None:
        """Runs a collective in this thread, after all that are queued. ``kind`` and ``size`` are for the page."""
        self.number = number = self.number + 1
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
        """Queues a collective for the thread of the queue."""
        self.number = number = self.number + 1
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
        """Ends the thread when the queue is empty; further calls raise."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake.put(False)
            self._thread.join()
        with self._turn:
            self.closed = reason

    def _start(self) -> None:
        with self._turn:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"phalanx-shm-{self._name}", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        # Until torch is asked, a new thread computes with one thread per core. The result of a callback would then
        # differ in its last bit from that of another rank's main thread.
        torch.get_num_threads()
        while self._wake.get():
            with self._turn:
                if self._queue:  # a synchronous call may have run it already
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
        except Exception as raised:  # noqa: BLE001 (wait raises it)
            error = raised
        except BaseException as raised:  # of a signal: raised in this thread too
            work.end(raised)
            raise
        before, self._calling_back = self._calling_back, threading.get_ident()
        try:
            work.end(error)
        finally:
            self._calling_back = before

    def _run(self, entry: int, run: Callable[..., None], *arguments: object) -> None:
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
