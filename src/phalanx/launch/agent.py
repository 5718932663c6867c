"""The agent: one on each node, without torch. It starts the workers, watches them, stops them, restarts them.

Everything is an event on a file descriptor: a worker's output, its report, its end, a signal. The loop sleeps until
one comes or a deadline passes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from phalanx import events
from phalanx.diagnose import report
from phalanx.diagnose.findings import Verdict, find_cause, is_victim
from phalanx.diagnose.repetition import Repetition
from phalanx.errors import LaunchError
from phalanx.launch import wire
from phalanx.launch.company import new_company
from phalanx.launch.console import Console
from phalanx.launch.devices import usable_cores
from phalanx.launch.elastic import RunOver
from phalanx.launch.logs import Pump
from phalanx.launch.member import Member, new_member
from phalanx.launch.network import Route
from phalanx.launch.nursery import Nursery
from phalanx.launch.pace import Pace
from phalanx.launch.record import Record
from phalanx.launch.signals import Signals
from phalanx.launch.spec import LaunchSpec, WorkerSpec, worker_environment
from phalanx.launch.watch import Watch

_TICK = 0.5
_DRAIN_SECONDS = 2.0  # after a signal, how long to wait for somebody to read the console


class Agent:
    """One run on this node, from its run directory to its exit code. Use it once."""

    def __init__(
        self,
        spec: LaunchSpec,
        environ: Mapping[str, str],
        nursery: Nursery,
        directory: Path,
        route: Route | None = None,
    ) -> None:
        """``route``: to the other nodes, if there are any."""
        self._spec = spec
        self._nursery = nursery
        self._directory = directory
        self._console = Console()
        self._record = Record(directory, self._say)
        self._selector = selectors.DefaultSelector()
        self._signals = Signals(spec.signals, self._selector)
        self._signalled: int | None = None
        """The first signal that told the agent to stop."""
        self._resumable: list[Pump] = []
        self._environ = dict(environ)
        self._repetition = Repetition()
        self._said_exec = False
        self._said_who: str | None = None
        self._exit_code: int | None = None
        self._pace = Pace(directory, self._record, lambda text: self._say([text]))
        self._interface = route.interface if route is not None else None
        self._company = new_company(
            spec, route, nursery, self._selector, directory, lambda text: self._say([text]), self._show
        )

    def drained(self) -> None:
        """The console has written the agent's own lines; nothing waits for that."""

    def run(self) -> int:
        """From the first process to the last; returns the exit code."""
        self._signals.take()
        try:
            self._announce()
            self._exit_code = self._run_attempts()
            return self._exit_code
        except _Interrupted:
            assert self._signalled is not None
            return 128 + self._signalled
        except RunOver as over:
            self._say([f"the run has ended with exit code {over.exit_code} before this node could take part"])
            return over.exit_code
        except LaunchError as error:
            self._say([f"{error}"], "cause")
            self._record.note("ended", exit_code=1, error=str(error))
            return 1
        finally:
            self._signals.restore()
            self._close()

    def _announce(self) -> None:
        spec = self._spec
        if spec.nproc_per_node > 1:
            threads = ""
            if self._environ.get("OMP_NUM_THREADS") != os.environ.get("OMP_NUM_THREADS"):
                count = self._environ["OMP_NUM_THREADS"]
                threads = f", OMP_NUM_THREADS={count} for each (cores {usable_cores()}, divided by ranks)"
            self._say([f"{spec.nproc_per_node} ranks{threads}; logs in {self._record.place}"], "announce")
        self._record.keep_order(spec)

    # ---- attempts

    def _meet(self, attempt: int) -> int:
        """The other nodes. What the zygote says meanwhile is heard too: it may have failed to import something."""
        self._selector.register(self._nursery, selectors.EVENT_READ, self._nursery.next_event)
        attempt = self._company.meet(attempt, self._idle_until)
        self._selector.unregister(self._nursery)
        introduction = self._company.introduction()
        if introduction != self._said_who:
            self._said_who = introduction
            self._say([f"{introduction}"], "announce")
        return attempt

    def _idle_until(self, done: Callable[[], bool]) -> None:
        """The loop while no worker runs."""
        while not done():
            for key, _ in self._selector.select(_TICK):
                key.data()
            if self._signals.pending:
                self._signalled = self._signals.pending.pop(0)
                self._company.tell_stop(self._why_stop(), for_good=True)
                if not self._nursery.ready:
                    self._nursery.kill()  # it imports, and hears nothing; later it ends the keeper with itself
                raise _Interrupted

    def _run_attempts(self) -> int:
        most = self._spec.max_restarts + 1
        attempt = 0
        while True:
            attempt = self._meet(attempt)
            endings = self._company.settle(self._run_attempt(attempt), self._idle_until)
            if self._signalled is not None:
                # What had failed before the signal came is told all the same.
                failed = any(ending.failed and not ending.asked for ending in endings)
                verdict = find_cause(endings) if failed else None
                return self._end(128 + self._signalled, endings, verdict, attempt)
            if not any(ending.failed for ending in endings) and not self._company.lost:
                return self._end(0, endings, None, attempt)
            verdict, reason = self._blame(endings)
            last = attempt + 1 >= most or not self._company.can_go_on
            if not last and verdict is not None and self._repetition.add(verdict.cause):
                last = True
                self._say([f"{self._repetition}; the {most - attempt - 1} attempts left are not made"])
            if last:
                if verdict is None:
                    self._flush_console()
                    self._say([reason], "cause")
                return self._end(verdict.cause.status if verdict else 1, endings, verdict, attempt)
            attempt += 1
            self._record.note("restarting", attempt=attempt, cause=reason)
            self._say([f"{reason}; starting again, attempt {attempt + 1} of {most}"])

    def _blame(self, endings: list[events.Ending]) -> tuple[Verdict | None, str]:
        """The rank that is the cause, or None when no rank is but a node; and either in a sentence."""
        if not any(ending.failed and not ending.asked and not is_victim(ending) for ending in endings):
            reason = self._company.loss() or self._company.stop_reason
            if reason:
                return None, reason
        verdict = find_cause(endings)
        return verdict, report.one_line(verdict.cause)

    def _run_attempt(self, attempt: int) -> list[events.Ending]:
        master = self._company.begin(attempt, self._idle_until)
        if master is None:
            return []
        self._pace.begin()
        self._watch = Watch(self._nursery, self._selector, self._spec.shutdown_timeout, self._record.note)
        name = self._directory.name if self._spec.run_id == "none" else self._spec.run_id
        for place in self._company.places():
            events.error_path(self._directory, place.rank).unlink(missing_ok=True)
            member = new_member(
                self._spec, place, self._directory, attempt, self._console, self._resume, lambda text: self._say([text])
            )
            environment = worker_environment(self._environ, self._spec, place, master, attempt, name, self._interface)
            worker = WorkerSpec(
                place.rank, place.local_rank, self._spec.program, environment, start_method=self._spec.start_method
            )
            self._start(member, worker)
        self._loop_until(lambda: self._watch.all_exited)
        self._watch.finish()
        # Nobody can write to the pipes any more, so each of them ends.
        drained_by = time.monotonic() + _DRAIN_SECONDS
        self._loop_until(lambda: not self._streams() or (self._signalled is not None and time.monotonic() > drained_by))
        endings = self._watch.endings()
        self._record.keep_errors(endings)
        self._watch.close()
        return endings

    def _start(self, member: Member, worker: WorkerSpec) -> None:
        stdin = _standard_input()
        try:
            self._watch.start(member, worker, [stdin, *(pump.writer for pump in member.pumps)])
        finally:
            os.close(stdin)
        for pump in member.pumps:
            self._selector.register(pump, selectors.EVENT_READ, lambda pump=pump: self._pump(pump))

    # ---- the loop

    def _loop_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._watch.turn(_TICK)
            self._explain_exec()
            self._obey_signals()
            self._heed_company()
            self._pace.look(self._watch.members)
            self._resume_pumps()
            now = time.monotonic()
            for member in self._watch.members.values():
                for pump in member.pumps:
                    pump.tick(now)

    def _heed_company(self) -> None:
        """Ranks are stopped on all nodes or on none."""
        if self._watch.stopping is None and (self._company.stop_reason or self._company.lost):
            self._watch.stop(signal.SIGTERM)
        if self._watch.stopping is not None:
            self._company.tell_stop(self._why_stop(), for_good=self._signalled is not None)

    def _why_stop(self) -> str:
        if self._signalled is not None:
            name = signal.Signals(self._signalled).name
            return f"{self._company.name} was stopped by {name}, and so are all others"
        return f"a rank of {self._company.name} failed"

    def _streams(self) -> list[Pump]:
        """The pipes that have not ended."""
        return [pump for member in self._watch.members.values() for pump in member.pumps if not pump.ended]

    def _pump(self, pump: Pump) -> None:
        if not pump.read() or pump.paused:
            self._selector.unregister(pump)

    def _resume(self, pump: Pump) -> None:
        """Called on the console's thread: this pump may be read again."""
        self._resumable.append(pump)
        self._signals.wake()

    def _resume_pumps(self) -> None:
        while self._resumable:
            pump = self._resumable.pop()
            if not pump.ended and pump.fileno() not in self._selector.get_map():
                self._selector.register(pump, selectors.EVENT_READ, lambda pump=pump: self._pump(pump))

    def _explain_exec(self) -> None:
        why = self._watch.why_exec
        if why and self._spec.start_method == "auto" and self._spec.program.kind != "command" and not self._said_exec:
            self._said_exec = True
            self._say([f"each rank imports torch by itself, because {why}"])

    # ---- signals

    def _obey_signals(self) -> None:
        while self._signals.pending:
            number = self._signals.pending.pop(0)
            again = self._signalled is not None
            if not again:
                self._signalled = number
                name = signal.Signals(number).name
                hurry = "Ctrl-C again" if number == signal.SIGINT else f"another {name}"
                self._say(
                    [f"{name}: stopping the ranks, {self._spec.shutdown_timeout:g} s at most ({hurry}: at once)"],
                    "signal",
                )
            if not self._watch.any_started:
                self._nursery.kill()  # nothing of the user's has started yet
                raise _Interrupted
            if again and self._watch.all_exited:
                raise _Interrupted  # only the console is waited for, and the user does not want to
            self._watch.stop(number, at_once=again)

    # ---- the end

    def _end(self, exit_code: int, endings: list[events.Ending], verdict: Verdict | None, attempt: int) -> int:
        self._record.keep_end(exit_code, endings, verdict, attempt)
        if verdict is not None:
            self._flush_console()
            elsewhere = self._company.log_of(verdict.cause)
            if elsewhere is None and self._spec.node_name is not None:  # who reads it may sit before another machine
                elsewhere = f"{self._spec.node_name}:{self._directory.absolute()}"
            self._say(self._record.failure_block(verdict, len(endings), attempt + 1, elsewhere), "verdict")
        return exit_code

    def _show(self, text: str) -> bool:
        """A line for a moment, on a terminal: the next one is written over it."""
        is_terminal = self._console.is_terminal[self._console.err]
        if is_terminal:
            self._console.show_live(self._console.err, f"phalanx: {text}".encode())
        return is_terminal

    def _flush_console(self) -> None:
        """The ranks' own lines first; but who has signalled does not want to wait for a reader."""
        while not self._console.flush(0.2) and not self._signals.pending and self._signalled is None:
            pass

    def _say(self, lines: list[str], topic: str = "") -> None:
        self._console.put(self, self._console.err, wire.spoken(lines, topic, self._spec.node_name))

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # the keeper is gone already
            self._company.close(self._exit_code)
        self._console.close(timeout=None if self._signalled is None else 2.0)
        self._record.close()
        self._selector.close()
        self._signals.close()


class _Interrupted(Exception):
    """A signal came when no worker ran: before the first had started, or after the last had ended."""


def _standard_input() -> int:
    try:
        return os.dup(0)
    except OSError:  # the agent was started with standard input closed
        return os.open(os.devnull, os.O_RDONLY)
