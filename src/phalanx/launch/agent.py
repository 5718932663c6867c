"""The agent: one on each node, without torch. It starts the workers, watches them, stops them, restarts them.

Everything is an event on a file descriptor: a worker's output, its report, its end, a signal. The loop sleeps until
one comes or a deadline passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from phalanx import events
from phalanx.diagnose import report
from phalanx.diagnose.findings import Verdict, find_cause, is_victim
from phalanx.errors import LaunchError
from phalanx.launch import wire
from phalanx.launch.company import new_company
from phalanx.launch.console import Console
from phalanx.launch.devices import usable_cores
from phalanx.launch.logs import Pump
from phalanx.launch.member import Member, new_member
from phalanx.launch.network import Route
from phalanx.launch.nursery import Nursery
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
        self._run_id = directory.name
        self._log = events.EventLog(directory / "agent.events.jsonl")
        self._console = Console()
        self._selector = selectors.DefaultSelector()
        self._signals = Signals(spec.signals, self._selector)
        self._signalled: int | None = None
        """The first signal that told the agent to stop."""
        self._resumable: list[Pump] = []
        self._host = socket.gethostname()
        self._started = time.time()
        self._environ = dict(environ)
        self._said_exec = False
        self._interface = route.interface if route is not None else None
        self._company = new_company(spec, route, nursery, self._selector, directory, self._show)

    def drained(self) -> None:
        """The console has written the agent's own lines; nothing waits for that."""

    def run(self) -> int:
        """From the first process to the last; returns the exit code."""
        self._signals.take()
        try:
            self._announce()
            self._meet()
            return self._run_attempts()
        except _Interrupted:
            assert self._signalled is not None
            return 128 + self._signalled
        except LaunchError as error:
            self._say([f"{error}"], "cause")
            self._log.write("ended", exit_code=1, error=str(error))
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
            directory = report.shorten_path(str(self._directory))
            self._say([f"{spec.nproc_per_node} ranks{threads}; logs in {directory}"], "announce")
        content = {
            "run_id": self._run_id,
            "host": self._host,
            "started": self._started,
            "command": sys.argv,
            "directory": str(Path.cwd()),
            "executable": sys.executable,
            "prefix": sys.prefix,
            "spec": dataclasses.asdict(spec),
        }
        self._keep("run.json", content)

    # ---- attempts

    def _meet(self) -> None:
        """The other nodes. What the zygote says meanwhile is heard too: it may have failed to import something."""
        self._selector.register(self._nursery, selectors.EVENT_READ, self._nursery.next_event)
        self._company.meet(self._idle_until)
        self._selector.unregister(self._nursery)

    def _idle_until(self, done: Callable[[], bool]) -> None:
        """The loop while no worker runs."""
        while not done():
            for key, _ in self._selector.select(_TICK):
                key.data()
            if self._signals.pending:
                self._signalled = self._signals.pending.pop(0)
                self._company.tell_stop(self._why_stop())
                if not self._nursery.ready:
                    self._nursery.kill()  # it imports, and hears nothing; later it ends the keeper with itself
                raise _Interrupted

    def _run_attempts(self) -> int:
        most = self._spec.max_restarts + 1
        for attempt in range(most):
            endings = self._company.settle(self._run_attempt(attempt), self._idle_until)
            if self._signalled is not None:
                # What had failed before the signal came is told all the same.
                failed = any(ending.failed and not ending.asked for ending in endings)
                verdict = find_cause(endings) if failed else None
                return self._end(128 + self._signalled, endings, verdict, attempt)
            if not any(ending.failed for ending in endings) and not self._company.lost:
                return self._end(0, endings, None, attempt)
            if not any(ending.failed and not ending.asked and not is_victim(ending) for ending in endings):
                reason = self._company.loss() or self._company.stop_reason
                if reason:
                    self._flush_console()
                    self._say([reason], "cause")
                    return self._end(1, endings, None, attempt)
            verdict = find_cause(endings)
            if attempt + 1 == most or self._company.lost:
                return self._end(verdict.cause.status, endings, verdict, attempt)
            self._log.write("restarting", attempt=attempt + 1, cause=report.headline(verdict.cause))
            self._say([f"{report.one_line(verdict.cause)}; starting again, attempt {attempt + 2} of {most}"])
        raise AssertionError("the last attempt returns")

    def _run_attempt(self, attempt: int) -> list[events.Ending]:
        master = self._company.begin(attempt, self._idle_until)
        self._watch = Watch(self._nursery, self._selector, self._spec.shutdown_timeout, self._log.write)
        name = self._run_id if self._spec.run_id == "none" else self._spec.run_id
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
        for ending in endings:
            if ending.error is not None:
                self._keep(f"error-{ending.rank}.json", dataclasses.asdict(ending.error))
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
            self._company.tell_stop(self._why_stop())

    def _why_stop(self) -> str:
        if self._signalled is not None:
            name = signal.Signals(self._signalled).name
            return f"node {self._spec.node_rank} (host {self._host}) was stopped by {name}, and so are all others"
        return f"a rank of node {self._spec.node_rank} (host {self._host}) failed"

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
        content = {
            "exit_code": exit_code,
            "attempts": attempt + 1,
            "seconds": round(time.time() - self._started, 3),
            "cause": dataclasses.asdict(verdict.cause) if verdict else None,
            "victims": verdict.victims if verdict else (),
            "ranks": [dataclasses.asdict(ending) for ending in endings],
        }
        self._keep("report.json", content)
        self._log.write("ended", exit_code=exit_code)
        if verdict is not None:
            self._flush_console()
            block = report.failure_block(
                verdict,
                world_size=len(endings),
                host=verdict.cause.host or self._host,
                started=self._started,
                log=self._log_of(verdict.cause),
                attempts=attempt + 1,
            )
            self._say(block, "verdict")
        return exit_code

    def _log_of(self, ending: events.Ending) -> str:
        elsewhere = self._company.log_of(ending)
        if elsewhere is not None:
            return f"{elsewhere}/{events.log_path(Path(), ending.rank)}"
        if self._spec.node_name is not None:  # who reads it may sit before another machine
            return f"{self._spec.node_name}:{events.log_path(self._directory, ending.rank).absolute()}"
        return report.shorten_path(str(events.log_path(self._directory, ending.rank)))

    def _show(self, text: str) -> None:
        """A line for a moment: the next one is written over it."""
        if self._console.is_terminal[self._console.err]:
            self._console.show_live(self._console.err, f"phalanx: {text}".encode())

    def _flush_console(self) -> None:
        """The ranks' own lines first; but who has signalled does not want to wait for a reader."""
        while not self._console.flush(0.2) and not self._signals.pending and self._signalled is None:
            pass

    def _keep(self, name: str, content: Mapping[str, object]) -> None:
        """A file of the run directory. That it cannot be written is said, and is no reason to stop a run."""
        try:
            events.write_json(self._directory / name, content)
        except OSError as error:
            self._say([f"cannot write {name} into {report.shorten_path(str(self._directory))}: {error.strerror}."])

    def _say(self, lines: list[str], topic: str = "") -> None:
        self._console.put(self, self._console.err, wire.spoken(lines, topic, self._spec.node_name))

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # the keeper is gone already
            self._company.close()
        self._console.close(timeout=None if self._signalled is None else 2.0)
        self._log.close()
        self._selector.close()
        self._signals.close()


class _Interrupted(Exception):
    """A signal came when no worker ran: before the first had started, or after the last had ended."""


def _standard_input() -> int:
    try:
        return os.dup(0)
    except OSError:  # the agent was started with standard input closed
        return os.open(os.devnull, os.O_RDONLY)
