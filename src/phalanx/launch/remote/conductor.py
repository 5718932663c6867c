"""The conductor: starts the agents of all hosts from one command, without torch, and prints for all of them.

It reaches each host by a transport (transports.py), which starts remote_agent.py there. These answer what their
machines have; when all fit together, they get the master's address, and run agents as if started by hand. The agents
send their lines here, and each is printed once. The standard input of a remote agent is its lifeline: it ends with the
conductor.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phalanx import secret
from phalanx.errors import LaunchError
from phalanx.launch.agent.event_loop import EventLoop
from phalanx.launch.agent.run_stop import IN_A_HURRY, NOTICES, seconds_to_end
from phalanx.launch.output import wire_protocol
from phalanx.launch.output.agent_lines import AgentLines
from phalanx.launch.output.console import Console
from phalanx.launch.remote import compatibility, transports
from phalanx.launch.remote.host_connection import HostConnection
from phalanx.launch.remote.transports import Transport
from phalanx.launch.spec.launch_spec import HostList, LaunchSpec

_TICK = 0.5
_OTHERS_MAY_ANSWER = 3.0  # after one host has failed, so that all failures are reported at once
_OTHERS_MAY_END = 2.0  # by themselves, after one has ended with a failure
_KILL_MARGIN = 10.0  # beside the shutdown timeout, until a transport is killed
_DRAIN_SECONDS = 2.0
_CLOSE_SECONDS = 2.0  # for hosts that have answered, and have not been started


def conduct(spec: LaunchSpec, argv: Sequence[str], environ: Mapping[str, str], *, is_launch: bool = False) -> int:
    """Runs ``argv`` on all hosts of the spec. Returns the exit code.

    ``is_launch``: these are arguments of ``python -m phalanx.launch``.
    """
    assert spec.host_list is not None
    secret.make()
    environment = transports.forwarded_environment(environ, spec.host_list.export)
    return _Conductor(spec, spec.host_list, tuple(argv), environment, is_launch).run()


class _Conductor:
    def __init__(
        self,
        spec: LaunchSpec,
        host_list: HostList,
        argv: tuple[str, ...],
        environment: Mapping[str, str],
        is_launch: bool,
    ) -> None:
        self._spec, self._host_list = spec, host_list
        self._argv, self._environment, self._is_launch = argv, environment, is_launch
        self._seconds_to_end = seconds_to_end(spec, environment)  # the scheduler's variables are forwarded too
        self._transports = [transports.find_transport(host, host_list) for host in host_list.hosts]
        self._console = Console()
        self._lines = AgentLines(self._console)
        self._print = self._lines.say_one
        self._loop = EventLoop((*spec.signals, *(number.name for number in NOTICES), "SIGCHLD"))
        self._connections: list[HostConnection] = []
        self._signalled: list[int] = []
        self._verdict: str | None = None
        self._has_cause = False
        self._is_stopping = False
        """A signal has reached agents, perhaps not the conductor: the ranks stop in the time of the scheduler."""
        self._exit_code = 0
        self._end_by: float | None = None
        """The time at which the remaining hosts are stopped; set by the first that failed."""
        self._kill_by: float | None = None
        self._beat_at = 0.0

    def run(self) -> int:
        self._loop.take_signals()
        try:
            self._start_all()
            self._await_answers()
            if not self._signalled:
                self._begin()
                self._turn_until(lambda: all(connection.is_over for connection in self._connections))
                self._print_verdict()
            return self._spec.stopped_code(self._signalled[0]) if self._signalled else self._exit_code
        finally:
            self._loop.restore_signals()
            self._close()

    # ---- starting

    def _start_all(self) -> None:
        if self._host_list.transport == "srun":
            names = [host.name for host in self._host_list.hosts]
            text = f"SLURM gives {len(names)} nodes ({', '.join(names)}); starting on all of them with srun"
            self._print(text if len(names) > 1 else f"SLURM gives the node {names[0]}; starting there with srun")
        for node, transport in enumerate(self._transports):
            connection = HostConnection(node, transport, self._console, self._loop.resume_pipe, self._receive)
            self._connections.append(connection)
            for stream in connection.streams:
                self._loop.add_pipe(stream)
            connection.send(self._order(node, transport))

    def _order(self, node: int, transport: Transport) -> wire_protocol.Order:
        first, own = self._transports[0], secret.text()
        assert own is not None
        return wire_protocol.Order(
            argv=self._argv,
            is_launch=self._is_launch,
            directory=str(Path.cwd()),
            environment=self._environment,
            nnodes=len(self._transports),
            secret=own,
            node=node,
            name=transport.host.name,
            slots=transport.host.slots,
            by_ssh=transport.kind == "ssh",
            # Only ssh reports the address by which a host is reached; otherwise the others look up its name.
            resolve=first.host.name if first.kind != "ssh" and node > 0 else None,
        )

    def _await_answers(self) -> None:
        """Waits until every host is ready. Raises the failures of all hosts at once."""
        deadline = time.monotonic() + self._spec.rdzv_timeout

        def is_settled() -> bool:
            nonlocal deadline
            waiting = [connection for connection in self._connections if not (connection.hello or connection.refusal)]
            if any(connection.refusal for connection in self._connections):
                deadline = min(deadline, time.monotonic() + _OTHERS_MAY_ANSWER)
            self._lines.show(f"{len(self._connections) - len(waiting)} of {len(self._connections)} hosts have answered")
            return not waiting or time.monotonic() >= deadline or bool(self._signalled)

        self._turn_until(is_settled)
        if self._signalled:
            return
        refusals = [connection.refusal for connection in self._connections if connection.refusal]
        silent = [connection.name for connection in self._connections if not (connection.hello or connection.refusal)]
        if silent and not refusals:
            refusals = [f"{', '.join(silent)} did not answer within {self._spec.rdzv_timeout:g} s (--rdzv-timeout)."]
        if refusals:
            raise LaunchError("\n".join(refusals))
        compatibility.compare(self._connections)

    def _begin(self) -> None:
        go = wire_protocol.Go()
        if len(self._connections) > 1:
            go = wire_protocol.Go(*compatibility.master(self._connections, self._spec))
        self._print(compatibility.summary(self._connections))
        for connection in self._connections:
            connection.send(go)

    # ---- the loop

    def _turn_until(self, done: Callable[[], bool]) -> None:
        while not done():
            for key, _ in self._loop.selector.select(_TICK):
                key.data()
            self._handle_signals()
            self._loop.turn_pipes(stream for connection in self._connections for stream in connection.streams)
            now = time.monotonic()
            if now >= self._beat_at:
                self._beat_at = now + wire_protocol.BEAT_SECONDS
                for connection in self._connections:
                    connection.beat()
            for connection in self._connections:
                connection.flush()
                if not connection.is_over and connection.process.poll() is not None:
                    self._finish(connection)
            self._stop_remaining(now)

    def _finish(self, connection: HostConnection) -> None:
        """Reads the rest of the output of a transport that has ended, and finds out why it ended."""
        deadline = time.monotonic() + _DRAIN_SECONDS  # a program that the user's ssh has started may hold them open
        while not all(stream.ended for stream in connection.streams) and time.monotonic() < deadline:
            for stream in connection.streams:
                self._loop.add_pipe(stream)
            for key, _ in self._loop.selector.select(0.1):
                key.data()
        connection.is_over = True
        code = connection.process.poll()
        assert code is not None
        if connection.hello is None:
            connection.refusal = connection.refusal or connection.transport.why_not_started(code, connection.last_lines)
        elif connection.ended_with is None:
            self._fail(connection.transport.why_lost(code, connection.last_lines) + "; all hosts are stopped")
            self._end_by = time.monotonic()
        elif connection.ended_with != 0:
            self._exit_code = self._exit_code or connection.ended_with
            if not self._signalled:  # otherwise all are stopping, each in the time that its ranks need
                self._end_by = self._end_by or time.monotonic() + _OTHERS_MAY_END

    def _fail(self, text: str) -> None:
        """Ends the run for a reason of the conductor's own. Only the first reason is printed."""
        self._exit_code = self._exit_code or 1
        if not self._has_cause and self._verdict is None and not self._signalled:
            self._has_cause = True
            self._print(text)

    def _stop_remaining(self, now: float) -> None:
        left = [connection for connection in self._connections if not connection.is_over]
        if self._end_by is not None and now >= self._end_by and self._kill_by is None:
            seconds = self._seconds_to_end if self._is_stopping else self._spec.seconds_to_end
            self._kill_by = now + seconds + _KILL_MARGIN
            for connection in left:
                connection.send(wire_protocol.PassSignal(int(signal.SIGTERM)))
        if self._kill_by is not None and now >= self._kill_by:
            for connection in left:
                self._fail(f"{connection.name} has not ended in time; its connection is closed")
                connection.process.kill()  # which ends its lifeline

    # ---- messages of the hosts

    def _receive(self, connection: HostConnection, message: wire_protocol.FromHost) -> None:
        match message:
            case wire_protocol.Hello():
                connection.accept(message)
            case wire_protocol.Refused(text) if connection.hello is None:
                connection.refusal = f"{connection.name}: {text}"
            case wire_protocol.Refused(text):
                self._fail(f"{connection.name}: {text}")
                self._end_by = time.monotonic()
            case wire_protocol.Ended(code):
                connection.ended_with = code
            case wire_protocol.Lines(text, topic):
                self._print_once(text, topic)

    def _print_once(self, text: str, topic: wire_protocol.Topic) -> None:
        """Prints a line that every node sends, and omits the consequences of the first cause."""
        self._is_stopping |= topic == "signal" and self._end_by is None
        if topic == "verdict" and not self._has_cause:
            self._verdict = self._verdict or text  # printed below the last lines of all nodes
        elif topic == "cause" and not self._has_cause and self._verdict is None:
            self._has_cause = True
            self._print(text)
        elif topic == "" or (topic == "signal" and (self._signalled or self._is_stopping)):
            self._lines.say_once(text)

    def _print_verdict(self) -> None:
        if self._verdict is not None:
            while not self._console.flush(0.2) and not self._signalled:
                self._handle_signals()
            self._print(self._verdict)

    # ---- signals

    def _handle_signals(self) -> None:
        while self._loop.signals:
            number = self._loop.signals.pop(0)
            if number == signal.SIGCHLD:
                continue  # it has woken the loop
            if number not in NOTICES:
                self._signalled.append(number)
                self._kill_by = self._kill_by or time.monotonic() + self._seconds_to_end + _KILL_MARGIN
            # A scheduler may send SIGTERM more than once; only a person hurries.
            is_hurried = sum(number in IN_A_HURRY for number in self._signalled[1:]) > 1
            for connection in self._connections:
                if is_hurried:
                    connection.process.kill()
                elif not connection.is_over and (connection.hello or number not in NOTICES):
                    connection.send(wire_protocol.PassSignal(number))

    # ---- the end

    def _close(self) -> None:
        for connection in self._connections:
            connection.close_lifeline()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for connection in self._connections:
            connection.close(max(0.0, deadline - time.monotonic()) if connection.hello else 0.0)
        self._console.close(timeout=2.0 if self._signalled else None)
        self._loop.close()
