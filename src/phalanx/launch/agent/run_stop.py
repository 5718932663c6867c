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

from phalanx import env, messages
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
_SHORTEST_AGREEMENT, _LONGEST_AGREEMENT, _STEPS = 10.0, 60.0, 3
"""Seconds to find a step, for ranks whose steps are short; for others, as many steps take, but not more than that.
Kubernetes and SLURM kill after 30 seconds, if nobody has set another time."""
_LOOK_EVERY = 1.0
"""Seconds between two looks at a known end of the run."""
_TO_HEAR = 5.0
"""Seconds until all agents have got a signal that one of them, or a rank, has got."""
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
        self._is_alone = spec.node_name is None and not spec.shares_console
        """Nobody else prints on this console."""
        self._attempt: AttemptRun
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
        self._has_heard = False
        """This process has got a signal itself that ends the run."""
        self._is_hurried = False
        """Somebody did not want to wait for the ranks, and knows what that means."""
        self._by = ""
        self.reason: str | None = None
        """Why a rank has asked to stop."""
        self.step: int | None = None
        """The optimizer steps after which all ranks have stopped."""
        self._exchange: Exchange | None = None
        self._agreement: Agreement | None = None
        self._number = 0
        self._waiting: dict[int, str] = {}
        """Other signals, which have come while the ranks agree on a step for the first; with their reasons."""
        self._delivered: dict[int, float] = {}

    def begin(self, attempt: AttemptRun, exchange: Exchange | None) -> None:
        """Begins a new attempt. ``exchange``: with the other nodes, if there are any."""
        self._end_agreement()
        self._attempt, self._exchange = attempt, exchange
        self.reason = self.step = None
        self._waiting, self._delivered = {}, {}
        attempt.before_signals = self._release
        if exchange is not None:
            exchange.receivers["stop"] = self._receive

    def on_signal(self, number: int) -> None:
        """A signal of this process."""
        if number in NOTICES:
            self._request(number, "")
            return
        # Ctrl-C may have reached another node, or a rank, first: that is one and the same.
        is_again = self._has_heard or time.time() > self.signalled_at + _TO_HEAR
        self._has_heard = True
        if not self._is_told:
            self._begin(number, "")
        elif number in IN_A_HURRY and is_again:
            self._end_agreement()
            self._is_hurried = True
            self._attempt.stop(number, at_once=True)

    def ending(self, numbers: Sequence[int]) -> list[int]:
        """Those of the signals that end a run while it has no ranks: neither notices, nor a scheduler's repetitions."""
        return [each for each in numbers if each in IN_A_HURRY or (each not in NOTICES and self.signal is None)]

    @property
    def _is_told(self) -> bool:
        """A signal has asked the run to end that is no notice."""
        return self.signal is not None and self.signal not in NOTICES

    def turn(self) -> None:
        """To be called in every turn of the loop."""
        requests = [(rank, each) for rank in self._attempt.ranks.values() for each in rank.take_stop_requests()]
        if self._attempt.is_stopping or self._attempt.all_exited:
            self._end_agreement()  # ranks report the signals of their agent, too
            return
        for rank, request in requests:
            if request.signal == 0 and self.reason is None:
                self.reason = request.reason
                self._say([f"rank {rank.rank} asks to stop: {request.reason}"])
            self._begin(request.signal, request.reason)
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
        """Stops the ranks if the end of the run is near. A script that cannot stop early has all of its time."""
        if self._exchange is not None and not self._exchange.is_judge:
            return  # one node looks for all
        votes = self._votes()
        can_stop, longest_save = votes.can_stop(signal.SIGTERM), votes.longest_save()
        votes.close()
        if deadline.is_due(longest_save) if can_stop else deadline.is_ours and deadline.left <= 0:
            self._begin(signal.SIGTERM, deadline.name, deadline.describe())

    def outcome(self, endings: Sequence[Ending]) -> tuple[StopRecord, list[str]]:
        """How the stop has ended, for report.json and for the console."""
        from phalanx.preemption import outcome

        by = self._by or (f"a request ({self.reason})" if self.signal is None else _name(self.signal))
        record = outcome.record(by, self.step, endings)
        seconds = None if self._is_hurried else time.time() - self.signalled_at
        return record, outcome.lines(record, seconds, endings)

    def requeue(self) -> None:
        """Puts the SLURM job back into its queue, where --requeue asks for it. SLURM then ends what is left of it."""
        if self._requeued is not None and self.signal is not None:
            from phalanx.preemption.deadline import requeue

            self._say([requeue(self._requeued, self._restarts)])

    @property
    def longest_wait(self) -> float:
        """Seconds that the loop may sleep."""
        return 0.5 if self._agreement is None else 0.002

    def _begin(self, number: int, reason: str, text: str = "") -> None:
        """Begins the stop that a signal of any process asks for. ``text``: for the console of the first node."""
        if number and number not in NOTICES and not self._is_told:
            if self._deadline is not None and reason == self._deadline.name:
                self._limit = max(self._limit, self._deadline.left)  # that is what the stop began early for
            self._set_signal(number, reason)
            again = "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C"
            at_most = f"{self._limit:.0f} s at most"
            limit = at_most if self._limit < math.inf else "in the time that the scheduler gives them"
            if text or not reason:
                self._say([f"{text or self._by}: stopping the ranks, {limit} ({again}: at once)"])
            if self.step is not None:  # they stop already
                self._attempt.let_end(self._limit)
        self._request(number, reason)

    def _set_signal(self, number: int, by: str = "") -> None:
        """The run ends by this signal."""
        self.signal, self._by, self.signalled_at = number, by or _name(number), time.time()

    def _request(self, number: int, reason: str) -> None:
        """Lets the ranks agree on a step at which they get the signal."""
        is_same = time.monotonic() < self._delivered.get(number, -math.inf) + _SAME_CAUSE
        if self._attempt.is_stopping or is_same or self.step is not None:
            return
        if self._agreement is not None:
            if number != self._number:
                self._waiting[number] = reason
            return
        from phalanx.preemption.agreement import Agreement
        from phalanx.watchdog.exchange import Exchange

        votes = self._votes()
        limit = min(max(_SHORTEST_AGREEMENT, _STEPS * votes.step_seconds()), _LONGEST_AGREEMENT, self._limit / 2)
        self._number = number
        self._agreement = Agreement(votes, self._exchange or Exchange(), number, reason, limit)
        self.turn()

    def _votes(self) -> NodeVotes:
        from phalanx.preemption.agreement import NodeVotes

        ranks = self._attempt.ranks
        return NodeVotes(self._directory, ranks, lambda rank: ranks[rank].exited is not None)

    def _release(self) -> None:
        """The agent itself signals the ranks, as after a failure: that is no request, and they get it at once."""
        votes = self._votes()
        votes.release(votes.last_epoch() + 1, (signal.SIGTERM, signal.SIGINT))
        votes.close()

    def _receive(self, node: int, body: bytes) -> None:
        """The first message of another node about a stop."""
        from phalanx.preemption.agreement import Message, Request

        message = messages.decode(body, Message, f"node {node}")
        if isinstance(message, Request):
            is_named = self._is_alone and message.signal and not message.reason
            self._begin(message.signal, message.reason, f"{_name(message.signal)} on another node" if is_named else "")
            if self._agreement is not None:
                self._agreement.receive(node, body)

    def _have_stopped(self) -> None:
        """The ranks have stopped at the agreed step: what they do now is up to the script."""
        assert self._agreement is not None
        number, reason, votes = self._agreement.signal, self._agreement.reason, self._agreement.votes
        if number != self._number:  # another node was first, with another signal
            self._waiting[self._number] = ""
        step, is_scripts = votes.clocks(number).stop_points, number in NOTICES and votes.are_handled(number)
        self._end_agreement()
        if is_scripts:  # what it means, and how the run ends, is the script's own affair
            return
        self.step = step
        if number == 0:
            self.reason = self.reason or reason
            return
        if self.signal is None:
            self._set_signal(number)
        self._attempt.let_end(self._limit if self._is_told else math.inf)

    def _signal_at_once(self) -> None:
        assert self._agreement is not None
        number, votes = self._agreement.signal, self._agreement.votes
        why, can_stop, are_handled = self._agreement.why_released, votes.can_stop(number), votes.are_handled(number)
        left = votes.ranks - self._agreement.stopped
        self._end_agreement()
        if why:
            self._say([f"{why}; {'the signal is delivered at once' if number else 'they continue'}"])
        if number in NOTICES:
            self._attempt.pass_on(number, left)
            if not can_stop:
                self._say([f"{_name(number)}: the script neither handles it nor asks px.stop, so the ranks continue"])
            elif not are_handled and self.signal is None:
                self._set_signal(number)
        elif number:
            self._attempt.stop(number, timeout=self._limit)
        else:
            self.reason = None
            if not why:
                self._say(["not all ranks train and ask px.stop, so they continue"])

    def _end_agreement(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
            self._delivered[self._number] = time.monotonic()
            if self._exchange is not None:
                self._exchange.receivers["stop"] = self._receive


def _name(number: int) -> str:
    return signal.Signals(number).name
