"""The agent: one on each node, without torch. It starts the ranks, watches them, stops them, restarts them.

Everything is an event on a file descriptor: a rank's output, its report, its end, a signal. The loop sleeps until
one comes or a deadline passes. What only a failure needs is imported on a failure.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import ForeignData, LaunchError
from phalanx.events import Ending
from phalanx.launch.agent.attempt_run import AttemptRun
from phalanx.launch.agent.event_loop import EventLoop
from phalanx.launch.agent.rank_process import open_rank
from phalanx.launch.agent.run_record import RunRecord
from phalanx.launch.agent.run_stop import IN_A_HURRY, NOTICES, RunStop
from phalanx.launch.agent.watchdogs import Watchdogs
from phalanx.launch.multinode import RunOver, SingleNode, new_peers
from phalanx.launch.output.agent_lines import AgentLines
from phalanx.launch.output.console import Console
from phalanx.launch.process.helper_processes import HelperLost, describe_left
from phalanx.launch.process.zygote_client import ZygoteClient
from phalanx.launch.spec.device_count import describe_threads
from phalanx.launch.spec.launch_spec import LaunchSpec, WorkerSpec, worker_environment

if TYPE_CHECKING:
    from phalanx.failure.root_cause import Verdict
    from phalanx.launch.agent.failure_judge import FailureJudge
    from phalanx.launch.spec.network import Route

_TICK = 0.5
_DRAIN_SECONDS = 2.0  # after a signal, for a reader of the console


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
        self._spec, self._environ, self._zygote, self._directory = spec, dict(environ), zygote, directory
        self._interfaces = route.settings() if route is not None else {}
        self._console = Console()
        self._agent_lines = AgentLines(self._console, spec.node_name, spec.shares_console)
        self._say = self._agent_lines.say
        self._record = RunRecord(directory, self._say)
        self._loop = EventLoop({*spec.signals, *(number.name for number in NOTICES)})
        self._stop = RunStop(spec, environ, directory, lambda lines: self._say(list(lines), "signal"))
        self._introduction: str | None = None
        self._exit_code: int | None = None
        self._helper_loss: list[str] = []
        """How this attempt has lost the zygote or the keeper; empty when it has not."""
        self._watchdogs = Watchdogs(spec, directory, self._record, self._agent_lines, self._loop.wake)
        lines, selector, note = self._agent_lines, self._loop.selector, self._record.note
        self._peers = new_peers(spec, route, zygote, selector, directory, lines.say_one, lines.show, note)

    def run(self) -> int:
        """Runs all attempts and returns the exit code."""
        self._loop.take_signals()
        try:
            if self._spec.nproc_per_node > 1:
                threads = describe_threads(self._environ, self._spec)
                self._say([f"{self._spec.nproc_per_node} ranks{threads}; logs in {self._record.place}"], "announce")
            self._record.keep_order(self._spec)
            self._exit_code = self._run_attempts()
            return self._exit_code
        except _Interrupted:
            assert self._stop.signal is not None
            return self._end(self._spec.stopped_code(self._stop.signal), [], None, 0)
        except RunOver as over:
            text = f"the run has ended with exit code {over.exit_code} before this node could take part"
            self._say([text])
            self._record.keep_end(over.exit_code, said=[text])
            return over.exit_code
        except (LaunchError, ForeignData) as error:
            lines = [str(error), *(f"  {line}" for line in self._watchdogs.last_words())]
            self._say(lines, "cause")
            self._record.keep_end(1, said=lines)
            return 1
        finally:
            self._loop.restore_signals()
            with contextlib.suppress(OSError):  # the keeper is gone already
                self._peers.close(self._exit_code)
            self._console.close(timeout=None if self._stop.signal is None else 2.0)
            self._record.close()
            self._loop.close()

    @functools.cached_property
    def _judge(self) -> FailureJudge:
        from phalanx.launch.agent.failure_judge import FailureJudge  # not needed while all goes well

        return FailureJudge(self._directory, self._spec, self._record, self._watchdogs, self._peers)

    def _run_attempts(self) -> int:
        attempt = 0
        while True:
            self._helper_loss, endings = [], []
            try:
                attempt = self._meet(attempt)
                endings = self._peers.settle(self._run_attempt(attempt), self._idle_until)
            except HelperLost as lost:  # before any rank was started
                if not isinstance(self._peers, SingleNode):
                    raise
                self._lose_helper(lost)
            if self._stop.signal is not None:
                cause = self._judge.cause_before(self._stop.signalled_at, endings)
                return self._end(self._spec.stopped_code(self._stop.signal), endings, cause, attempt)
            has_failed = any(ending.failed for ending in endings) or (self._helper_loss and not endings)
            if not has_failed and not self._peers.lost and self._watchdogs.hang is None:
                return self._end(0, endings, None, attempt)
            verdict, reason = self._judge.judge(endings, self._helper_loss)
            left = self._judge.restarts_left()
            # What even SIGKILL has not ended still holds the run's memory, ports and devices.
            is_last = left < 0 or not self._peers.can_restart or bool(self._zygote.left)
            if not is_last and (loop := self._judge.crash_loop(verdict, endings, bool(self._helper_loss))):
                is_last = True
                self._say([f"{loop}; the {left + 1} attempts left are not made"])
            if is_last:
                return self._end(verdict.cause.status if verdict else 1, endings, verdict, attempt, reason)
            attempt += 1
            self._record.keep_restart(attempt, reason, verdict)
            self._say([self._judge.restart_text(reason, attempt, left), *self._helper_loss[1:]])
            if self._helper_loss:
                self._zygote.restart()

    def _meet(self, attempt: int) -> int:
        """Meets the other nodes. Events of the zygote are read meanwhile: it may have failed to import something."""
        self._loop.selector.register(self._zygote, selectors.EVENT_READ, self._zygote.next_event)
        try:
            attempt = self._peers.meet(attempt, self._idle_until)
        finally:
            self._loop.selector.unregister(self._zygote)
        introduction = self._peers.introduction()
        if introduction != self._introduction:
            self._introduction = introduction
            self._say([f"{introduction}"], "announce")
        return attempt

    def _run_attempt(self, attempt: int) -> list[Ending]:
        if (master := self._peers.begin(attempt, self._idle_until)) is None:
            return []
        self._attempt = run = AttemptRun(
            self._zygote, self._loop.selector, self._spec.seconds_to_end, self._print_notice, self._record.note
        )
        self._watchdogs.begin(self._peers.directory_label(self._record.place), self._peers.exchange)
        self._stop.begin(run, self._peers.exchange)
        try:
            self._start_ranks(master, attempt)
            self._loop_until(lambda: run.all_exited)
            run.finish()
            # The ranks have ended; if the keeper had before them, that was the reason.
            self._helper_loss = [self._zygote.keeper_lost] if self._zygote.keeper_lost else []
        except HelperLost as lost:
            run.detach()
            self._lose_helper(lost)
            run.give_up()
            self._tell_stop()
        self._watchdogs.close()
        self._read_last_output()
        endings = self._watchdogs.add_memory(run.endings())
        if any(ending.failed for ending in endings) or self._stop.is_requested:
            endings = self._judge.add_evidence(endings)
        self._record.keep_errors(endings)
        run.close()
        return endings

    def _start_ranks(self, master: tuple[str, int], attempt: int) -> None:
        spec, loop = self._spec, self._loop
        run_id = self._directory.name if spec.run_id == "none" else spec.run_id
        for place in self._peers.places():
            rank = open_rank(
                spec, place, self._directory, attempt, self._console, loop.resume_pipe, self._agent_lines.say_one
            )
            environment = worker_environment(self._environ, spec, place, master, attempt, run_id, self._interfaces)
            cpus = spec.cpus[place.local_rank] if spec.cpus is not None else None
            worker = WorkerSpec(place.rank, place.local_rank, spec.program, environment, spec.start_method, cpus)
            self._attempt.start(rank, worker)
            for pipe in rank.pipes:
                loop.add_pipe(pipe)

    def _read_last_output(self) -> None:
        """Reads the pipes to their end. A process that was not found, or not ended, may keep them open."""
        run, zygote = self._attempt, self._zygote
        pids = {rank.pid: rank.rank for rank in run.ranks.values() if rank.pid is not None}
        for sentence in describe_left(zygote.left, pids):
            self._say([sentence])
        limit = time.monotonic() + _DRAIN_SECONDS
        has_limit = bool(zygote.left or (self._helper_loss and zygote.has_ended))
        self._loop_until(
            lambda: not run.pipes or ((has_limit or self._stop.signal is not None) and time.monotonic() > limit)
        )

    def _idle_until(self, done: Callable[[], bool]) -> None:
        """The loop while no rank runs."""
        while not done():
            for key, _ in self._loop.selector.select(_TICK):
                key.data()
            ends = self._stop.ending(self._loop.signals)
            self._continue_helpers(at_once=bool(ends))
            if ends:
                self._stop.signal = ends[0]
                self._tell_stop()
                if not self._zygote.ready:
                    self._zygote.kill()  # while it imports it reads nothing; later it ends the keeper with itself
                raise _Interrupted

    def _loop_until(self, done: Callable[[], bool]) -> None:
        run = self._attempt
        while not done():
            run.turn(self._stop.longest_wait)
            self._watchdogs.turn(run)
            self._explain_exec()
            self._continue_helpers(at_once=run.is_stopping)
            self._obey_signals()
            self._stop.turn()
            self._stop_if_needed()
            self._loop.turn_pipes(run.pipes)

    def _stop_if_needed(self) -> None:
        """Stops the ranks when they have to; they are stopped on all nodes or on none."""
        run, peers, watchdogs = self._attempt, self._peers, self._watchdogs
        if not run.is_stopping and (peers.stop_reason or peers.lost or watchdogs.hang or self._zygote.keeper_lost):
            run.stop(signal.SIGTERM)
        if watchdogs.standing is not None:
            run.stop_waiting_for_cause()
        if run.is_stopping:
            self._tell_stop()

    def _tell_stop(self) -> None:
        why = self._judge.why_stop(self._helper_loss, self._stop.signal)
        self._peers.stop_others(why, for_good=self._stop.signal is not None)

    def _continue_helpers(self, *, at_once: bool) -> None:
        for sentence in self._zygote.check_helpers(at_once=at_once):
            self._say([sentence])

    def _lose_helper(self, lost: HelperLost) -> None:
        """The zygote or the keeper is gone, or does not answer: ends all that it has started without it."""
        self._helper_loss = [str(lost), *(f"  {line}" for line in self._watchdogs.last_words())]
        self._zygote.abort()

    def _explain_exec(self) -> None:
        why = self._attempt.why_exec
        if why and self._spec.start_method == "auto" and self._spec.program.kind != "command":
            self._agent_lines.say_once(f"each rank imports torch by itself, because {why}")

    def _print_notice(self, notice: str) -> None:
        """Prints a notice of rank 0; not again in the next attempt."""
        if self._agent_lines.say_once(notice):
            self._record.note("notice", text=notice)

    def _obey_signals(self) -> None:
        while self._loop.signals:
            number = self._loop.signals.pop(0)
            if number not in NOTICES and not self._attempt.any_started:
                self._stop.signal = number
                self._zygote.kill()  # nothing of the user's has started yet
                raise _Interrupted
            if self._stop.signal is not None and self._attempt.all_exited and number in IN_A_HURRY:
                raise _Interrupted  # only the console is waited for, and the user does not want to
            self._stop.on_signal(number)

    def _end(
        self, exit_code: int, endings: list[Ending], verdict: Verdict | None, attempt: int, reason: str | None = None
    ) -> int:
        """Writes the report and prints why the run has failed. ``reason``: the cause when no rank is."""
        said = [] if reason is None else [reason, *self._helper_loss[1:]]
        if verdict is not None:
            elsewhere = self._peers.log_of(verdict.cause)
            said = self._judge.failure_block(verdict, len(endings), attempt + 1, elsewhere)
        stop = None
        if verdict is None and reason is None and self._stop.is_requested:
            stop, said = self._stop.outcome(endings)
        hang, log_of = self._watchdogs.hang, self._peers.log_of
        self._record.keep_end(exit_code, endings, verdict, attempt, said, log_of, hang, stop)
        if said:
            self._agent_lines.let_ranks_finish(lambda: bool(self._loop.signals) or self._stop.signal is not None)
            self._say(said, "verdict" if verdict is not None else "signal" if stop else "cause")
        if stop is not None and self._peers.is_first:
            self._stop.requeue()
        return exit_code


class _Interrupted(Exception):
    """A signal came when no rank ran: before the first had started, or after the last had ended."""
