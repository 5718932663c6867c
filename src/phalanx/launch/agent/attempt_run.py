"""The watch over the workers of one attempt: an event loop, and the rule for when one rank's end is everyone's.

The first failure that is not the consequence of another stops the rest. A rank that merely lost its connection is
such a consequence; the watch then waits a while for the rank that left, which may be busy with its own clean-up
before it can say why.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from phalanx import events, messages
from phalanx.launch.agent.rank_process import RankProcess
from phalanx.launch.agent.stop_sequence import StopSequence
from phalanx.launch.output.logs import OutputPipe
from phalanx.launch.process.helper_processes import HelperLost
from phalanx.launch.process.zygote_client import ZygoteClient
from phalanx.launch.process.zygote_messages import Exited, Started
from phalanx.launch.spec.launch_spec import WorkerSpec

_MOST_UNDER_WAY = 16
_TO_FAIL_ALIKE = 0.25
"""Seconds that the others get when native code has ended one: often all end so at once, and none is a victim."""
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_LEAST_TO_DIE, _MOST_TO_DIE = 3.0, 20.0
"""Seconds that ranks get to end after SIGKILL: twice the shutdown timeout, within these bounds."""
_TO_SAY_WHERE = 0.5
"""Seconds that the others get to say where they were, when one has noticed that they have called different things."""


class AttemptRun:
    """Holds the members of an attempt.

    ``note`` is told of everything that happens, for the event file; ``say`` of what rank 0 has for the console.
    """

    def __init__(
        self,
        zygote: ZygoteClient,
        selector: selectors.BaseSelector,
        shutdown_timeout: float,
        say: Callable[[str], None],
        note: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self.members: dict[int, RankProcess] = {}
        self.why_exec: str | None = None
        self.stopping: StopSequence | None = None
        self._zygote = zygote
        self._selector = selector
        self._waiting: deque[tuple[RankProcess, WorkerSpec, list[int]]] = deque()
        """Still to be asked for, with their descriptors."""
        self._under_way = 0
        """Asked for, and not yet heard of."""
        self._last_signal: int | None = None
        self._timeout = shutdown_timeout
        self._note, self._say = note, say
        self._killed_at: float | None = None
        """When all ranks were sent SIGKILL."""
        self._suspicion: float | None = None
        """Until when to wait for the cause, after a rank that merely lost its connection."""
        selector.register(zygote, selectors.EVENT_READ, self._hear_zygote)
        self._is_listening = True

    def start(self, member: RankProcess, worker: WorkerSpec, fds: Sequence[int], extra: Sequence[int] = ()) -> None:
        """``fds``: its three standard streams; ``extra``: what a function refers to. Both stay the caller's."""
        self.members[member.rank] = member
        self._waiting.append((member, worker, [os.dup(fd) for fd in (*fds, member.report_writer, *extra)]))
        member.close_writers()
        self._selector.register(member.report_reader, selectors.EVENT_READ, lambda: self._hear_report(member))
        self._send_starts()

    def _send_starts(self) -> None:
        """A few at a time, and none before the zygote listens: a send that has to wait would make the loop deaf."""
        while self._waiting and self._zygote.ready and self._under_way < _MOST_UNDER_WAY:
            _, worker, fds = self._waiting.popleft()
            self._under_way += 1
            try:
                self._zygote.start(worker, fds)
            finally:
                _close_all(fds)

    def _call_off_starts(self) -> None:
        """Those that have not even been asked for will not be."""
        while self._waiting:
            member, _, fds = self._waiting.popleft()
            _close_all(fds)
            member.asked_at = time.time()
            self._has_exited(member, Exited(member.rank, 0, None, signal.SIGTERM))

    @property
    def all_exited(self) -> bool:
        return all(member.exited for member in self.members.values())

    @property
    def any_started(self) -> bool:
        return any(member.pid is not None for member in self.members.values())

    @property
    def streams(self) -> list[OutputPipe]:
        """The pipes of all ranks that have not ended."""
        return [pipe for member in self.members.values() for pipe in member.pipes if not pipe.ended]

    def turn(self, longest_wait: float | None) -> None:
        """One turn of the loop: waits for something to happen and does what is due."""
        for key, _ in self._selector.select(self._patience(longest_wait)):
            if key.fd in self._selector.get_map():  # what came before it in this turn may have ended it
                key.data()
        now = time.monotonic()
        if self._suspicion is not None and now >= self._suspicion and self.stopping is None:
            self.stop(signal.SIGTERM)
        if self.stopping is not None:
            self._send_due(now)
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

    def _patience(self, longest_wait: float | None) -> float | None:
        now = time.monotonic()
        deadlines = [now + longest_wait] if longest_wait is not None else []
        if self.stopping is not None and self.stopping.next_step is not None:
            deadlines.append(self.stopping.next_step)
        if self._overdue_at is not None:
            deadlines.append(self._overdue_at)
        if self._suspicion is not None and self.stopping is None:
            deadlines.append(self._suspicion)
        return max(0.0, min(deadlines) - now) if deadlines else None

    def stop(self, first: int, *, at_once: bool = False, timeout: float | None = None) -> None:
        """Asks all ranks to end, with ``first``; those that are left after the timeout are killed."""
        timeout = self._timeout if timeout is None else timeout
        self.stopping = StopSequence.plan(first, 0.0 if at_once else timeout)
        self._note("stopping", signal=signal.Signals(first).name, at_once=at_once)
        self._call_off_starts()
        self._send_due(time.monotonic())

    def wait_for_no_cause(self) -> None:
        """Why ranks fail is known: who fails for waiting too long is followed by nobody who says more."""
        if self._suspicion is not None:
            self._suspicion = time.monotonic()

    def finish(self) -> None:
        """After the last exit: ends whatever the workers started and left behind, then listens no more."""
        self.detach()
        for event in self._zygote.sweep() if self._zygote.ready else ():
            self._handle(event)

    def detach(self) -> None:
        """Stops listening to the zygote."""
        if self._is_listening:
            self._is_listening = False
            self._selector.unregister(self._zygote)

    def give_up(self) -> None:
        """The zygote is gone, and its ranks with it: nobody will report how they have ended."""
        self.detach()
        self._call_off_starts()
        for member in self.members.values():
            if not member.exited:
                member.asked_at = member.asked_at or time.time()
                self._has_exited(member, Exited(member.rank, member.pid or 0, None, signal.SIGKILL))

    def abandon(self) -> None:
        """Ends the attempt without waiting for anybody; the zygote stays usable for the next, unless it is lost."""
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
        return [member.ending() for member in self.members.values()]

    def close(self) -> None:
        for member in self.members.values():
            member.close()

    def _hear_zygote(self) -> None:
        event = self._zygote.next_event()
        if event is not None:
            self._handle(event)
        self._send_starts()

    def _hear_report(self, member: RankProcess) -> None:
        if self._read_report(member):
            self._consider(member)
        if member.report_ended:
            self._selector.unregister(member.report_reader)

    def _read_report(self, member: RankProcess) -> bool:
        """Whether it has just told its error."""
        before, was_malformed = len(member.notices), member.malformed
        has_failed = member.read_report()
        if member.malformed is not None and was_malformed is None:
            self._note("malformed", rank=member.rank, text=member.malformed)
        for notice in member.notices[before:] if member.rank == 0 else ():
            self._say(notice)
        return has_failed

    def _handle(self, event: Started | Exited) -> None:
        member = self.members[event.rank]
        if isinstance(event, Exited):
            self._note("exited", **messages.asdict(event))
            self._has_exited(member, event)
            self._consider(member)
            return
        self._under_way -= 1
        member.pid = event.pid
        self.why_exec = event.why_exec
        self._note("started", rank=event.rank, pid=event.pid, exec=event.why_exec)
        if self._last_signal is not None:  # it was on its way when the others were told to stop
            self._tell(member, self._last_signal)

    def _has_exited(self, member: RankProcess, exited: Exited) -> None:
        self._read_report(member)
        if member.report_reader in self._selector.get_map():
            self._selector.unregister(member.report_reader)
        member.has_exited(exited)

    def _consider(self, member: RankProcess) -> None:
        """A rank has told an error, or ended: must the others stop?"""
        if self.stopping is not None:
            return
        if _is_victim(member):
            if self._suspicion is None:
                self._suspicion = time.monotonic() + self._timeout
        elif member.has_disagreed_on_gloo():
            self._suspicion = time.monotonic() + _TO_SAY_WHERE
        elif member.error is None and member.exited and member.exited.signal in _CRASHES:
            self._suspicion = time.monotonic() + _TO_FAIL_ALIKE
        elif member.error is not None or (member.exited and (member.exited.signal or member.exited.exit_code)):
            self.stop(signal.SIGTERM)

    def _send_due(self, now: float) -> None:
        assert self.stopping is not None
        for number in self.stopping.due(now):
            self._last_signal = number
            if number == signal.SIGKILL:
                self._killed_at = now
            for member in self.members.values():
                self._tell(member, number)

    def _tell(self, member: RankProcess, number: int) -> None:
        if member.pid is None or member.exited or (_is_cleaning_up(member) and number != signal.SIGKILL):
            return
        if member.asked_at is None:
            member.asked_at = time.time()
        member.asked_with = number
        self._zygote.signal(member.pid, number)
        if number != signal.SIGKILL:
            self._zygote.signal(member.pid, signal.SIGCONT)  # a stopped process would not hear the other one


def _is_cleaning_up(member: RankProcess) -> bool:
    """It failed by itself and is on its way out: what it does until then may be worth the shutdown timeout."""
    return member.error is not None and not _is_victim(member)


def _is_victim(member: RankProcess) -> bool:
    """Whether its error says no more than that another rank went away."""
    if member.error is None:
        return False
    from phalanx.failure.root_cause import is_consequence

    return is_consequence(member.error)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
