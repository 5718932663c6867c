"""The stop of a run that a signal, a rank or another node asks for.

Ranks that train, and handle the signal or ask px.stop, stop at a step that all of them have agreed on. Others get the
signal at once. One cause counts once, however many processes it has reached.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx import env
from phalanx.events import Ending, StopRecord
from phalanx.launch.agent.attempt_run import AttemptRun
from phalanx.launch.spec.launch_spec import LaunchSpec

if TYPE_CHECKING:
    from phalanx.preemption.agreement import Agreement, NodeVotes
    from phalanx.preemption.deadline import Deadline
    from phalanx.watchdog.exchange import Exchange

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
IN_A_HURRY = (signal.SIGINT, signal.SIGQUIT)
"""A person sends these a second time, who does not want to wait. A scheduler may send SIGTERM more than once."""
SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID", "INVOCATION_ID")
"""Each is set by a scheduler, or by systemd, that kills what does not end in time."""
_LONGEST_AGREEMENT = 30.0
_LOOK_EVERY = 1.0
"""Seconds between two looks at a known end of the run."""
_SAME_CAUSE = 1.0
"""Seconds after a stop in which the same signal is taken for a part of the same cause."""


def seconds_to_end(spec: LaunchSpec, environ: Mapping[str, str]) -> float:
    """Returns the time from a signal to the end of the ranks that are left: the scheduler's own, if there is one."""
    has_scheduler = any(environ.get(name) for name in SCHEDULERS)
    return math.inf if spec.shutdown_timeout is None and has_scheduler else spec.seconds_to_end


class RunStop:
    """The signals of one run on this node, and what the ranks do about them."""

    def __init__(
        self, spec: LaunchSpec, environ: Mapping[str, str], directory: Path, say: Callable[[Sequence[str]], None]
    ) -> None:
        self._directory, self._say = directory, say
        self._limit = seconds_to_end(spec, environ)
        self._deadline: Deadline | None = None
        if spec.time_limit is not None or environ.get("SLURM_JOB_ID"):
            from phalanx.preemption.deadline import Deadline

            self._deadline = Deadline(spec.time_limit, environ)
        self._look_at = 0.0
        self._requeued = environ.get("SLURM_JOB_ID") if spec.requeue else None
        """The SLURM job that is put back into its queue after a stop."""
        self._restarts = env.integer(environ, "SLURM_RESTART_COUNT") or 0
        self.signal: int | None = None
        """The first signal that ends the run."""
        self.signalled_at = 0.0
        self._is_hurried = False
        """Somebody did not want to wait for the ranks, and knows what that means."""
        self._by = ""
        self.reason: str | None = None
        """Why a rank has asked to stop."""
        self.step: int | None = None
        """The optimizer steps after which all ranks have stopped."""
        self.is_agreed = False
        """All nodes know, and their ranks stop at the same step."""
        self._agreement: Agreement | None = None
        self._number = 0
        self._waiting: dict[int, str] = {}
        """Other signals, which have come while the ranks agree on a step for the first; with their reasons."""
        self._delivered: dict[int, float] = {}

    def begin(self, attempt: AttemptRun, exchange: Exchange | None) -> None:
        """Begins a new attempt. ``exchange``: with the other nodes, if there are any."""
        self._attempt, self._exchange, self.is_agreed = attempt, exchange, False
        if exchange is not None:
            exchange.receivers["stop"] = self._receive

    def on_signal(self, number: int) -> None:
        """A signal of this process."""
        if number in NOTICES:
            self._request(number, "")
            return
        is_again = self.signal is not None
        self._take(number)
        if is_again and number in IN_A_HURRY:
            self._end_agreement()
            self._is_hurried = True
            self._attempt.stop(number, at_once=True)
        elif not is_again:
            self._request(number, "")

    def turn(self) -> None:
        """To be called in every turn of the loop."""
        for rank in self._attempt.ranks.values():
            while rank.stop_requests:
                request = rank.stop_requests.pop(0)
                if request.signal not in (0, *NOTICES):
                    self._take(request.signal)
                elif request.signal == 0 and self.reason is None:
                    self.reason = request.reason
                    self._say([f"rank {rank.rank} asks to stop: {request.reason}"])
                self._request(request.signal, request.reason)
        if self._deadline is not None and self.signal is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY
            self._stop_in_time(self._deadline)
        if self._agreement is not None:
            self._agreement.turn()
            if self._agreement.state == "stopped":
                self._have_stopped()
            elif self._agreement.state == "released":
                self._signal_at_once()
        elif self._waiting:
            number = next(iter(self._waiting))
            self._request(number, self._waiting.pop(number))

    @property
    def is_requested(self) -> bool:
        return self.signal is not None or self.reason is not None

    def _stop_in_time(self, deadline: Deadline) -> None:
        """Stops the ranks if the end of the run is near. Those that could not save are left to SLURM."""
        if self._exchange is not None and not self._exchange.is_judge:
            return  # one node looks for all
        votes = self._votes()
        can_stop, longest_save = votes.can_stop(signal.SIGTERM), votes.longest_save()
        votes.close()
        if (deadline.is_ours or can_stop) and deadline.is_due(longest_save):
            self._take(signal.SIGTERM, deadline.name, deadline.describe())
            self._request(signal.SIGTERM, deadline.name)

    def outcome(self, endings: Sequence[Ending]) -> tuple[StopRecord, list[str]]:
        """How the stop has ended, for report.json and for the console."""
        from phalanx.preemption import outcome

        by = self._by or (f"a request ({self.reason})" if self.signal is None else signal.Signals(self.signal).name)
        record = outcome.record(by, self.step, endings)
        return record, [] if self._is_hurried else outcome.lines(record, self._limit, endings)

    def requeue(self) -> None:
        """Puts the SLURM job back into its queue, where --requeue asks for it. SLURM then ends what is left of it."""
        if self._requeued is not None and self.signal is not None:
            from phalanx.preemption.deadline import requeue

            self._say([requeue(self._requeued, self._restarts)])

    @property
    def longest_wait(self) -> float:
        """Seconds that the loop may sleep."""
        return 0.5 if self._agreement is None else 0.002

    def _take(self, number: int, by: str = "", text: str = "") -> None:
        """``by``: what stops the run, if that is no signal; ``text``: the same for the console of the first node."""
        if self.signal is None:
            self.signal, self.signalled_at = number, time.time()
            again = "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C"
            limit = (
                "in the time that the scheduler gives them" if self._limit == math.inf else f"{self._limit:g} s at most"
            )
            self._by = by or signal.Signals(number).name
            if text or not by:
                self._say([f"{text or self._by}: stopping the ranks, {limit} ({again}: at once)"])

    def _request(self, number: int, reason: str) -> None:
        is_same = time.monotonic() < self._delivered.get(number, -math.inf) + _SAME_CAUSE
        if self._attempt.is_stopping or is_same:
            return
        if self._agreement is not None:
            if number != self._number:
                self._waiting[number] = reason
            return
        from phalanx.preemption.agreement import Agreement
        from phalanx.watchdog.exchange import Exchange

        limit = min(self._limit / 2, _LONGEST_AGREEMENT)
        self._number = number
        self._agreement = Agreement(self._votes(), self._exchange or Exchange(), number, reason, limit)
        self.turn()

    @property
    def _name(self) -> str:
        return signal.Signals(self._number).name

    def _votes(self) -> NodeVotes:
        from phalanx.preemption.agreement import NodeVotes

        ranks = self._attempt.ranks
        return NodeVotes(self._directory, ranks, lambda rank: ranks[rank].exited is not None)

    def _receive(self, node: int, body: bytes) -> None:
        """The first message of another node about a stop."""
        from phalanx.preemption.agreement import requested

        request = requested(node, body)
        if request is None:
            return
        if request.signal not in (0, *NOTICES):
            self._take(request.signal, request.reason)
        self._request(request.signal, request.reason)
        if self._agreement is not None:
            self._agreement.receive(node, body)

    def _have_stopped(self) -> None:
        """The ranks have stopped at the agreed step: what they do now is up to the script."""
        assert self._agreement is not None
        step = self._agreement.votes.clocks(self._number).stop_points
        is_scripts = self._number in NOTICES and self._agreement.votes.are_handled(self._number)
        self._end_agreement()
        if is_scripts:  # what it means, and how the run ends, is the script's own affair
            return
        self.is_agreed, self.step = True, step
        if self._number:
            self.signal, self._by = self.signal or self._number, self._by or self._name
            self._attempt.stop(None, timeout=math.inf if self._number in NOTICES else self._limit)

    def _signal_at_once(self) -> None:
        assert self._agreement is not None
        why, can_stop = self._agreement.why_released, self._agreement.votes.can_stop(self._number)
        left = self._agreement.votes.ranks - self._agreement.stopped
        self._end_agreement()
        if why:
            self._say([f"{why}; {'the signal is delivered at once' if self._number else 'they continue'}"])
        if self._number in NOTICES:
            self._attempt.pass_on(self._number, left)
            if not can_stop:
                self._say([f"{self._name}: the script neither handles it nor asks px.stop, so the ranks continue"])
        elif self._number:
            self._attempt.stop(self._number, timeout=self._limit)
        elif not why:
            self._say(["not all ranks train and ask px.stop, so they continue"])

    def _end_agreement(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
            self._delivered[self._number] = time.monotonic()
            if self._exchange is not None:
                self._exchange.receivers["stop"] = self._receive
