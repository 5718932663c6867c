"""The agent: one on each node, without torch. It starts the workers, watches them, stops them, restarts them.

Everything is an event on a file descriptor: a worker's output, its report, its end, a signal. The loop sleeps until
one comes or a deadline passes.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx import events
from phalanx.errors import ForeignData, LaunchError
from phalanx.launch.agent.attempt_run import AttemptRun
from phalanx.launch.agent.loss_tracker import LossTracker
from phalanx.launch.agent.rank_starter import RankStarter
from phalanx.launch.agent.run_record import RunRecord
from phalanx.launch.agent.signal_events import Signals
from phalanx.launch.agent.watchdogs import Watchdogs
from phalanx.launch.multinode import RunOver, SingleNode, new_peers
from phalanx.launch.output.agent_lines import AgentLines
from phalanx.launch.output.console import Console
from phalanx.launch.output.pipe_set import PipeSet
from phalanx.launch.process.helper_processes import HelperLost
from phalanx.launch.process.zygote_client import ZygoteClient
from phalanx.launch.spec.device_count import describe_threads
from phalanx.launch.spec.launch_spec import LaunchSpec

if TYPE_CHECKING:
    from phalanx.failure.root_cause import Verdict
    from phalanx.launch.spec.network import Route

_TICK = 0.5
_DRAIN_SECONDS = 2.0  # after a signal, how long to wait for somebody to read the console


class Agent:
    """One run on this node, from its run directory to its exit code. Use it once."""

    def __init__(
        self,
        spec: LaunchSpec,
        environ: Mapping[str, str],
        zygote: ZygoteClient,
        directory: Path,
        route: Route | None = None,
    ) -> None:
        """``route``: to the other nodes, if there are any."""
        self._spec = spec
        self._zygote = zygote
        self._directory = directory
        self._console = Console()
        self._agent_lines = AgentLines(self._console, spec.node_name)
        self._record = RunRecord(directory, self._agent_lines.say)
        self._selector = selectors.DefaultSelector()
        self._signals = Signals(spec.signals, self._selector)
        self._signalled: int | None = None
        """The first signal that told the agent to stop."""
        self._signalled_at = 0.0
        self._pipes = PipeSet(self._selector, self._signals.wake)
        self._environ = dict(environ)
        self._said_exec = False
        self._passed_on: set[str] = set()
        self._said_who: str | None = None
        self._exit_code: int | None = None
        self._losses = LossTracker(zygote, self._agent_lines.say)
        self._watchdogs = Watchdogs(spec, directory, self._record, self._agent_lines, self._signals.wake)
        interface = route.interface if route is not None else None
        complain = self._agent_lines.say_one
        self._starter = RankStarter(spec, self._environ, directory, interface, self._console, self._pipes, complain)
        say, show, note = self._agent_lines.say_one, self._agent_lines.show, self._record.note
        self._peers = new_peers(spec, route, zygote, self._selector, directory, say, show, note)

    def run(self) -> int:
        """From the first process to the last; returns the exit code."""
        self._signals.take()
        try:
            self._announce()
            self._exit_code = self._run_attempts()
            return self._exit_code
        except _Interrupted:
            assert self._signalled is not None
            self._record.keep_end(128 + self._signalled)
            return 128 + self._signalled
        except RunOver as over:
            text = f"the run has ended with exit code {over.exit_code} before this node could take part"
            self._agent_lines.say([text])
            self._record.keep_end(over.exit_code, said=[text])
            return over.exit_code
        except (LaunchError, ForeignData) as error:
            told = [str(error), *(f"  {line}" for line in self._watchdogs.last_words())]
            self._agent_lines.say(told, "cause")
            self._record.keep_end(1, said=told)
            return 1
        finally:
            self._signals.restore()
            self._close()

    def _announce(self) -> None:
        spec = self._spec
        if spec.nproc_per_node > 1:
            threads = describe_threads(self._environ, spec)
            self._agent_lines.say([f"{spec.nproc_per_node} ranks{threads}; logs in {self._record.place}"], "announce")
        self._record.keep_order(spec)

    # ---- attempts

    def _meet(self, attempt: int) -> int:
        """The other nodes. What the zygote says meanwhile is heard too: it may have failed to import something."""
        self._selector.register(self._zygote, selectors.EVENT_READ, self._zygote.next_event)
        try:
            attempt = self._peers.meet(attempt, self._idle_until)
        finally:
            self._selector.unregister(self._zygote)
        introduction = self._peers.introduction()
        if introduction != self._said_who:
            self._said_who = introduction
            self._agent_lines.say([f"{introduction}"], "announce")
        return attempt

    def _idle_until(self, done: Callable[[], bool]) -> None:
        """The loop while no worker runs."""
        while not done():
            for key, _ in self._selector.select(_TICK):
                key.data()
            self._losses.check(at_once=bool(self._signals.pending))
            if self._signals.pending:
                self._signalled = self._signals.pending.pop(0)
                self._peers.tell_stop(self._why_stop(), for_good=True)
                if not self._zygote.ready:
                    self._zygote.kill()  # it imports, and hears nothing; later it ends the keeper with itself
                raise _Interrupted

    def _run_attempts(self) -> int:
        most = self._spec.max_restarts + 1
        attempt = 0
        while True:
            self._losses.lines, endings = [], []
            try:
                attempt = self._meet(attempt)
                endings = self._peers.settle(self._run_attempt(attempt), self._idle_until)
            except HelperLost as lost:  # before any rank was started
                if not isinstance(self._peers, SingleNode):
                    raise
                self._losses.lose(lost, self._watchdogs.last_words())
            if self._signalled is not None:
                from phalanx.failure.root_cause import failed_before, find_cause

                # What had failed before the signal came is told all the same.
                verdict = find_cause(endings) if failed_before(self._signalled_at, endings) else None
                return self._end(128 + self._signalled, endings, verdict, attempt)
            has_failed = any(ending.failed for ending in endings) or (self._losses.lines and not endings)
            if not has_failed and not self._peers.lost and self._watchdogs.hang is None:
                return self._end(0, endings, None, attempt)
            verdict, reason = self._blame(endings)
            last = attempt + 1 >= most or not self._peers.can_go_on or self._losses.are_final
            if last or self._losses.is_crash_loop(verdict, endings, most - attempt - 1):
                return self._end(verdict.cause.status if verdict else 1, endings, verdict, attempt, reason)
            attempt += 1
            self._record.keep_restart(attempt, reason, verdict)
            self._agent_lines.say(
                [f"{reason}; starting again, attempt {attempt + 1} of {most}", *self._losses.lines[1:]]
            )
            if self._losses.lines:
                self._zygote.restart()

    def _blame(self, endings: list[events.Ending]) -> tuple[Verdict | None, str]:
        """The rank that is the cause, or None when no rank is but a helper, a node or a hang; either in a sentence."""
        from phalanx.failure.failure_text import one_line
        from phalanx.failure.root_cause import find_cause, is_victim

        by_itself = any(ending.failed and not ending.asked and not is_victim(ending) for ending in endings)
        if self._losses.lines and not by_itself:
            return None, self._losses.lines[0]
        if self._watchdogs.hang is not None:
            return None, self._watchdogs.hang.headline
        if not by_itself:
            reason = self._peers.loss() or self._peers.stop_reason or self._watchdogs.blame_standing(endings)
            if reason:
                return None, reason
        verdict = find_cause(endings)
        return verdict, one_line(verdict.cause)

    def _run_attempt(self, attempt: int) -> list[events.Ending]:
        if (master := self._peers.begin(attempt, self._idle_until)) is None:
            return []
        self._watch = AttemptRun(
            self._zygote, self._selector, self._spec.shutdown_timeout, self._pass_on, self._record.note
        )
        self._watchdogs.begin(self._peers.told_as(self._record.place), self._peers.exchange)
        try:
            self._starter.start(self._watch, self._peers.places(), master, attempt)
            self._loop_until(lambda: self._watch.all_exited)
            self._watch.finish()
            self._losses.take_keeper()
        except HelperLost as lost:
            self._watch.detach()
            self._losses.lose(lost, self._watchdogs.last_words())
            self._watch.give_up()
            self._peers.tell_stop(self._why_stop(), for_good=self._signalled is not None)
        self._watchdogs.close()
        self._losses.name_left(self._watch.members.values())
        # Nobody can write to the pipes any more, so each of them ends; unless somebody could not be found or ended.
        limit, has_limit = time.monotonic() + _DRAIN_SECONDS, self._losses.may_hold_pipes
        self._loop_until(
            lambda: not self._watch.streams or ((has_limit or self._signalled is not None) and time.monotonic() > limit)
        )
        endings = self._watchdogs.explain(self._watch.endings())
        self._record.keep_errors(endings)
        self._watch.close()
        return endings

    # ---- the loop

    def _loop_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._watch.turn(_TICK)
            self._watchdogs.turn(self._watch)
            self._explain_exec()
            self._losses.check(at_once=self._watch.stopping is not None)
            self._obey_signals()
            self._stop_if_needed()
            self._pipes.turn(self._watch.streams)

    def _stop_if_needed(self) -> None:
        """Ranks are stopped on all nodes or on none."""
        has_to = self._peers.stop_reason or self._peers.lost or self._watchdogs.hang or self._losses.has_to_stop
        if self._watch.stopping is None and has_to:
            self._watch.stop(signal.SIGTERM)
        if self._watchdogs.standing is not None:
            self._watch.wait_for_no_cause()
        if self._watch.stopping is not None:
            self._peers.tell_stop(self._why_stop(), for_good=self._signalled is not None)

    def _why_stop(self) -> str:
        if self._watchdogs.hang is not None:
            return self._watchdogs.hang.headline
        if self._losses.lines:
            return f"{self._peers.name}: {self._losses.lines[0]}"
        if self._signalled is not None:
            name = signal.Signals(self._signalled).name
            return f"{self._peers.name} was stopped by {name}, and so are all others"
        return f"a rank of {self._peers.name} failed"

    def _explain_exec(self) -> None:
        why = self._watch.why_exec
        if why and self._spec.start_method == "auto" and self._spec.program.kind != "command" and not self._said_exec:
            self._said_exec = True
            self._agent_lines.say([f"each rank imports torch by itself, because {why}"])

    def _pass_on(self, notice: str) -> None:
        """What rank 0 has to say; not again in the next attempt."""
        if notice not in self._passed_on:
            self._passed_on.add(notice)
            self._record.note("notice", text=notice)
            self._agent_lines.say_one(notice)

    # ---- signals

    def _obey_signals(self) -> None:
        while self._signals.pending:
            number = self._signals.pending.pop(0)
            again = self._signalled is not None
            if not again:
                self._signalled, self._signalled_at = number, time.time()
                name = signal.Signals(number).name
                hurry = "Ctrl-C again" if number == signal.SIGINT else f"another {name}"
                self._agent_lines.say(
                    [f"{name}: stopping the ranks, {self._spec.shutdown_timeout:g} s at most ({hurry}: at once)"],
                    "signal",
                )
            if not self._watch.any_started:
                self._zygote.kill()  # nothing of the user's has started yet
                raise _Interrupted
            if again and self._watch.all_exited:
                raise _Interrupted  # only the console is waited for, and the user does not want to
            self._watch.stop(number, at_once=again)

    # ---- the end

    def _end(
        self,
        exit_code: int,
        endings: list[events.Ending],
        verdict: Verdict | None,
        attempt: int,
        reason: str | None = None,
    ) -> int:
        """``reason``: what to say when no rank is the cause."""
        said = [] if reason is None else [reason, *self._losses.lines[1:]]
        if verdict is not None:
            elsewhere = self._peers.log_of(verdict.cause)
            if elsewhere is None and self._spec.node_name is not None:  # who reads it may sit before another machine
                elsewhere = f"{self._spec.node_name}:{self._directory.absolute()}"
            said = self._record.failure_block(verdict, len(endings), attempt + 1, elsewhere)
        self._record.keep_end(exit_code, endings, verdict, attempt, said, self._peers.log_of, self._watchdogs.hang)
        if said:
            self._agent_lines.let_ranks_finish(lambda: bool(self._signals.pending) or self._signalled is not None)
            self._agent_lines.say(said, "cause" if verdict is None else "verdict")
        return exit_code

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # the keeper is gone already
            self._peers.close(self._exit_code)
        self._console.close(timeout=None if self._signalled is None else 2.0)
        self._record.close()
        self._selector.close()
        self._signals.close()


class _Interrupted(Exception):
    """A signal came when no worker ran: before the first had started, or after the last had ended."""
