"""The watch over the workers of one attempt: an event loop, and the rule for when one rank's end is everyone's.

The first failure that is not the consequence of another stops the rest. A rank that merely lost its connection is
such a consequence; the watch then waits a while for the rank that left, which may be busy with its own clean-up
before it can say why.
"""

from __future__ import annotations

import dataclasses
import selectors
import signal
import time
from collections.abc import Callable, Sequence

from phalanx import events
from phalanx.diagnose.findings import is_consequence
from phalanx.launch.member import Member
from phalanx.launch.nursery import Event, Nursery, Started
from phalanx.launch.spec import WorkerSpec
from phalanx.launch.stopping import Stopping


class Watch:
    """Holds the members of an attempt. ``note`` is told of everything that happens, for the event file."""

    def __init__(
        self,
        nursery: Nursery,
        selector: selectors.BaseSelector,
        shutdown_timeout: float,
        note: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self.members: dict[int, Member] = {}
        self.why_exec: str | None = None
        self.stopping: Stopping | None = None
        self._nursery = nursery
        self._selector = selector
        self._timeout = shutdown_timeout
        self._note = note
        self._suspicion: float | None = None
        """Until when to wait for the cause, after a rank that merely lost its connection."""
        selector.register(nursery, selectors.EVENT_READ, self._hear_nursery)

    def start(self, member: Member, worker: WorkerSpec, fds: Sequence[int], extra: Sequence[int] = ()) -> None:
        """``fds``: its three standard streams; ``extra``: what a function refers to."""
        self.members[member.rank] = member
        try:
            self._nursery.start(worker, [*fds, member.report_writer, *extra])
        finally:
            member.close_writers()
        self._selector.register(
            member.report_reader, selectors.EVENT_READ, lambda: member.read_report() and self._consider(member)
        )

    @property
    def all_exited(self) -> bool:
        return all(member.exited for member in self.members.values())

    @property
    def any_started(self) -> bool:
        return any(member.pid is not None for member in self.members.values())

    def turn(self, longest_wait: float | None) -> None:
        """One turn of the loop: waits for something to happen and does what is due."""
        for key, _ in self._selector.select(self._patience(longest_wait)):
            key.data()
        now = time.monotonic()
        if self._suspicion is not None and now >= self._suspicion and self.stopping is None:
            self.stop(signal.SIGTERM)
        if self.stopping is not None:
            self._send_due(now)

    def _patience(self, longest_wait: float | None) -> float | None:
        now = time.monotonic()
        deadlines = [now + longest_wait] if longest_wait is not None else []
        if self.stopping is not None and self.stopping.next_step is not None:
            deadlines.append(self.stopping.next_step)
        if self._suspicion is not None and self.stopping is None:
            deadlines.append(self._suspicion)
        return max(0.0, min(deadlines) - now) if deadlines else None

    def stop(self, first: int, *, at_once: bool = False, timeout: float | None = None) -> None:
        """Asks all ranks to end, with ``first``; those that are left after the timeout are killed."""
        timeout = self._timeout if timeout is None else timeout
        self.stopping = Stopping.plan(first, 0.0 if at_once else timeout)
        self._note("stopping", signal=signal.Signals(first).name, at_once=at_once)
        self._send_due(time.monotonic())

    def finish(self) -> None:
        """After the last exit: ends whatever the workers started and left behind, then listens no more."""
        self._selector.unregister(self._nursery)
        for event in self._nursery.sweep():
            self._handle(event)

    def abandon(self) -> None:
        """Ends the attempt without waiting for anybody; the nursery stays usable for the next."""
        while not all(member.pid for member in self.members.values()):
            self.turn(None)
        if not self.all_exited:
            self.stop(signal.SIGKILL, at_once=True)
            while not self.all_exited:
                self.turn(None)
        self.finish()

    def endings(self) -> list[events.Ending]:
        return [member.ending() for member in self.members.values()]

    def close(self) -> None:
        for member in self.members.values():
            member.close()

    def _hear_nursery(self) -> None:
        event = self._nursery.next_event()
        if event is not None:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        member = self.members[event.rank]
        if isinstance(event, Started):
            member.pid = event.pid
            self.why_exec = event.why_exec
            self._note("started", rank=event.rank, pid=event.pid, exec=event.why_exec)
            return
        self._note("exited", **dataclasses.asdict(event))
        self._selector.unregister(member.report_reader)
        member.read_report()
        member.has_exited(event)
        self._consider(member)

    def _consider(self, member: Member) -> None:
        """A rank has told an error, or ended: must the others stop?"""
        if self.stopping is not None:
            return
        if member.error is not None and is_consequence(member.error):
            if self._suspicion is None:
                self._suspicion = time.monotonic() + self._timeout
        elif member.error is not None or (member.exited and (member.exited.signal or member.exited.exit_code)):
            self.stop(signal.SIGTERM)

    def _send_due(self, now: float) -> None:
        assert self.stopping is not None
        for number in self.stopping.due(now):
            for member in self.members.values():
                if member.pid is None or member.exited or (_is_cleaning_up(member) and number != signal.SIGKILL):
                    continue
                if member.asked_at is None:
                    member.asked_at = time.time()
                self._nursery.signal(member.pid, number)


def _is_cleaning_up(member: Member) -> bool:
    """It failed by itself and is on its way out: what it does until then may be worth the shutdown timeout."""
    return member.error is not None and not is_consequence(member.error)
