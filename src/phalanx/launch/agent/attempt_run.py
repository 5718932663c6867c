"""One attempt: starts the ranks of this node, handles their events, and stops them all when one has failed.

The first failure that is not the consequence of another stops the rest. A rank that merely lost its connection is
such a consequence: then the attempt waits a while for the rank that left first, which may be busy with its own
clean-up before it can report why.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from phalanx import events, messages
from phalanx.launch.agent.rank_process import RankProcess, stop_steps
from phalanx.launch.output.logs import OutputPipe
from phalanx.launch.process.helper_processes import HelperLost
from phalanx.launch.process.zygote_client import ZygoteClient
from phalanx.launch.process.zygote_messages import Exited, Started
from phalanx.launch.spec.launch_spec import WorkerSpec
from phalanx.system import procfs

_MOST_STARTING = 16
_TO_FAIL_ALIKE = 0.25
"""Seconds that the others get when native code has ended one: often all end so at once, and none is a victim."""
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_LEAST_TO_DIE, _MOST_TO_DIE = 3.0, 20.0
"""Seconds that ranks get to end after SIGKILL: twice the shutdown timeout, within these bounds."""
_TO_REPORT_CALLS = 0.5
"""Seconds that the others get to report where they were, when one has noticed that they called different things."""


class AttemptRun:
    """The ranks of one attempt.

    ``note`` gets everything that happens, for the event file; ``print_notice`` what rank 0 has for the console.
    """

    def __init__(
        self,
        zygote: ZygoteClient,
        selector: selectors.BaseSelector,
        shutdown_timeout: float,
        print_notice: Callable[[str], None],
        note: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self.ranks: dict[int, RankProcess] = {}
        self.why_exec: str | None = None
        self.is_stopping = self.is_ending = False
        """The ranks are told to stop; they end by themselves, by a request of their own or one that all have heard."""
        self.before_signals: Callable[[], None] = lambda: None
        self._stop_steps: list[tuple[float, int]] = []
        self._zygote, self._selector = zygote, selector
        self._waiting: deque[tuple[RankProcess, WorkerSpec, list[int]]] = deque()
        """Ranks that are still to be requested from the zygote, with their descriptors."""
        self._starting = 0
        """Ranks that the zygote was asked for and has not started yet."""
        self._last_signal: int | None = None
        self._timeout = shutdown_timeout
        self._note, self._print_notice = note, print_notice
        self._killed_at: float | None = None
        """When all ranks were sent SIGKILL."""
        self._stop_at: float | None = None
        """When the ranks are stopped for a failure unless its cause is reported before."""
        selector.register(zygote, selectors.EVENT_READ, self._read_zygote)
        self._is_attached = True

    def start(self, rank: RankProcess, worker: WorkerSpec, extra: Sequence[int] = ()) -> None:
        """Requests a rank; its output goes to its pipes, or to our own streams if it has none.

        ``extra``: descriptors that a function refers to; they stay the caller's.
        """
        self.ranks[rank.rank] = rank
        streams = [0, *(pipe.writer for pipe in rank.pipes)] if rank.pipes else [0, 1, 2]
        self._waiting.append((rank, worker, [os.dup(fd) for fd in (*streams, rank.report_writer, *extra)]))
        rank.close_writers()
        self._selector.register(rank.report_reader, selectors.EVENT_READ, lambda: self._on_report(rank))
        self._send_starts()

    def _send_starts(self) -> None:
        """A few at a time, and none before the zygote reads: a send that has to wait would block the loop."""
        while self._waiting and self._zygote.ready and self._starting < _MOST_STARTING:
            _, worker, fds = self._waiting.popleft()
            self._starting += 1
            try:
                self._zygote.start(worker, fds)
            finally:
                _close_all(fds)

    def _cancel_starts(self) -> None:
        while self._waiting:
            rank, _, fds = self._waiting.popleft()
            _close_all(fds)
            rank.asked_at = time.time()
            self._end_rank(rank, Exited(rank.rank, 0, None, signal.SIGTERM))

    @property
    def all_exited(self) -> bool:
        return all(rank.exited for rank in self.ranks.values())

    @property
    def any_started(self) -> bool:
        return any(rank.pid is not None for rank in self.ranks.values())

    @property
    def pipes(self) -> list[OutputPipe]:
        """The pipes that have not ended."""
        return [pipe for rank in self.ranks.values() for pipe in rank.pipes if not pipe.ended]

    def turn(self, longest_wait: float | None) -> None:
        """One turn of the loop: waits for an event and does what is due."""
        for key, _ in self._selector.select(self._seconds_to_wait(longest_wait)):
            if key.fd in self._selector.get_map():  # what came before it in this turn may have ended it
                key.data()
        now = time.monotonic()
        if self._stop_at is not None and now >= self._stop_at and not self.is_stopping:
            self.stop(signal.SIGTERM)
        self._send_due_signals(now)
        overdue = self._overdue_at
        if overdue is not None and now >= overdue:
            raise HelperLost(
                f"the process that starts the workers (pid {self._zygote.pid}) has not ended them "
                f"{overdue - (self._killed_at or 0):g} s after it was asked to send SIGKILL"
            )

    @property
    def _overdue_at(self) -> float | None:
        """When all ranks should have ended, once they were sent SIGKILL."""
        if self._killed_at is None or self.all_exited:
            return None
        return self._killed_at + min(max(2 * self._timeout, _LEAST_TO_DIE), _MOST_TO_DIE)

    def _seconds_to_wait(self, longest: float | None) -> float | None:
        now = time.monotonic()
        next_signal = self._stop_steps[0][0] if self._stop_steps else None
        stop_at = self._stop_at if not self.is_stopping else None
        longest_at = now + longest if longest is not None else None
        deadlines = [at for at in (longest_at, next_signal, self._overdue_at, stop_at) if at is not None]
        return max(0.0, min(deadlines) - now) if deadlines else None

    def stop(self, first: int, *, at_once: bool = False, timeout: float | None = None) -> None:
        """Sends ``first`` to all ranks, unless they end already; those that are left after the timeout are killed."""
        timeout = self._timeout if timeout is None else timeout
        self.is_stopping = True
        self._stop_steps = stop_steps(None if self.is_ending else first, 0.0 if at_once else timeout)
        self._note("stopping", signal=signal.Signals(first).name, at_once=at_once)
        self.before_signals()
        self._cancel_starts()
        self._send_due_signals(time.monotonic())

    def let_end(self, timeout: float) -> None:
        """The ranks end by themselves; those that are left after the timeout are killed, and soon if one has failed."""
        self.is_ending, self._stop_steps = True, stop_steps(None, timeout)
        for rank in self.ranks.values():
            rank.asked_at = rank.asked_at or time.time()

    def pass_on(self, number: int, ranks: Iterable[int]) -> None:
        """Sends a signal to those of the ranks that handle it: it would end the others."""
        for rank in (self.ranks[each] for each in ranks):
            handled = int(procfs.status(rank.pid).get("SigCgt", "0"), 16) if rank.pid and not rank.exited else 0
            if rank.pid and handled >> (number - 1) & 1:
                self._zygote.signal(rank.pid, number)

    def stop_waiting_for_cause(self) -> None:
        """The cause is known: a rank that timed out has no earlier failure to wait for."""
        if self._stop_at is not None:
            self._stop_at = time.monotonic()

    def finish(self) -> None:
        """After the last exit: ends the processes that the ranks have left behind, and detaches."""
        self.detach()
        for event in self._zygote.sweep() if self._zygote.ready else ():
            self._handle(event)

    def detach(self) -> None:
        """Reads no more events of the zygote."""
        if self._is_attached:
            self._is_attached = False
            self._selector.unregister(self._zygote)

    def give_up(self) -> None:
        """The zygote is gone, and its ranks with it: nobody will report how they have ended."""
        self.detach()
        self._cancel_starts()
        for rank in self.ranks.values():
            if not rank.exited:
                rank.asked_at = rank.asked_at or time.time()
                self._end_rank(rank, Exited(rank.rank, rank.pid or 0, None, signal.SIGKILL))

    def abandon(self) -> None:
        """Kills the ranks; the zygote stays usable for the next attempt, unless it is lost."""
        try:
            if not self.all_exited:
                self.stop(signal.SIGKILL, at_once=True)
                while not self.all_exited:
                    self.turn(None)
            self.finish()
        except HelperLost:
            self.detach()
            self._zygote.close()
            self.give_up()

    def endings(self) -> list[events.Ending]:
        return [rank.ending() for rank in self.ranks.values()]

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()

    def _read_zygote(self) -> None:
        event = self._zygote.next_event()
        if event is not None:
            self._handle(event)
        self._send_starts()

    def _on_report(self, rank: RankProcess) -> None:
        if self._read_report(rank):
            self._consider(rank)
        if rank.report_ended:
            self._selector.unregister(rank.report_reader)

    def _read_report(self, rank: RankProcess) -> bool:
        """Returns whether the rank has just reported its error."""
        before, was_malformed = len(rank.notices), rank.malformed
        has_failed = rank.read_report()
        if rank.malformed is not None and was_malformed is None:
            self._note("malformed", rank=rank.rank, text=rank.malformed)
        for notice in rank.notices[before:] if rank.rank == 0 else ():
            self._print_notice(notice)
        return has_failed

    def _handle(self, event: Started | Exited) -> None:
        rank = self.ranks[event.rank]
        if isinstance(event, Exited):
            self._note("exited", **messages.asdict(event))
            self._end_rank(rank, event)
            self._consider(rank)
            return
        self._starting -= 1
        rank.pid = event.pid
        self.why_exec = event.why_exec
        self._note("started", rank=event.rank, pid=event.pid, exec=event.why_exec)
        if self._last_signal is not None:  # it was being started when the others were sent this signal
            self._signal(rank, self._last_signal)

    def _end_rank(self, rank: RankProcess, exited: Exited) -> None:
        self._read_report(rank)
        if rank.report_reader in self._selector.get_map():
            self._selector.unregister(rank.report_reader)
        rank.set_exited(exited)

    def _consider(self, rank: RankProcess) -> None:
        """Decides whether the others must stop, now that this rank has reported an error or ended."""
        if self.is_stopping or (self.is_ending and not rank.has_crashed):
            return
        if self.is_ending:
            self.stop(signal.SIGTERM)
        elif rank.is_victim:
            if self._stop_at is None:
                self._stop_at = time.monotonic() + self._timeout
        elif rank.has_disagreed_on_gloo():
            self._stop_at = time.monotonic() + _TO_REPORT_CALLS
        elif rank.error is None and rank.exited and rank.exited.signal in _CRASHES:
            self._stop_at = time.monotonic() + _TO_FAIL_ALIKE
        elif rank.error is not None or (rank.exited and (rank.exited.signal or rank.exited.exit_code)):
            self.stop(signal.SIGTERM)

    def _send_due_signals(self, now: float) -> None:
        while self._stop_steps and self._stop_steps[0][0] <= now:
            _, number = self._stop_steps.pop(0)
            self._last_signal = number
            if number == signal.SIGKILL:
                self._killed_at = now
            for rank in self.ranks.values():
                self._signal(rank, number)

    def _signal(self, rank: RankProcess, number: int) -> None:
        # A rank that failed by itself is on its way out: its clean-up may be worth the shutdown timeout.
        is_cleaning_up = rank.error is not None and not rank.is_victim
        if rank.pid is None or rank.exited or (is_cleaning_up and number != signal.SIGKILL):
            return
        if rank.asked_at is None:
            rank.asked_at = time.time()
        rank.asked_with = number
        self._zygote.signal(rank.pid, number)
        if number != signal.SIGKILL:
            self._zygote.signal(rank.pid, signal.SIGCONT)  # a stopped process would not get the other one


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
