"""Runs where the command was typed, without torch: starts the agents of all hosts, and is their one voice.

One way a host (reach.py) leads to a remote (remote.py). The remotes answer for their machines; when all fit, they are
told where to meet, and run agents as if each had been started by hand. What those say comes here, from every node, and
is shown once. The standard input of a remote is its lifeline: with the conductor, all ends.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phalanx import secret
from phalanx.errors import LaunchError
from phalanx.launch.agent.event_loop import EventLoop
from phalanx.launch.output import wire_protocol
from phalanx.launch.output.console import Console
from phalanx.launch.remote import compatibility, forwarded_env
from phalanx.launch.remote.host_connection import HostConnection
from phalanx.launch.remote.transports import Transport, find_transport
from phalanx.launch.spec.launch_spec import HostList, LaunchSpec

_TICK = 0.5
_OTHERS_MAY_ANSWER = 3.0  # after one host has failed to: all that are wrong are named at once
_OTHERS_MAY_END = 2.0  # after one has ended with a failure: by themselves, before they are told to
_LAST_WORDS = 10.0  # beside the shutdown timeout, until a way is killed
_DRAIN_SECONDS = 2.0
_HANG_UP_SECONDS = 2.0  # for remotes that have answered, and have not been told to start


def conduct(spec: LaunchSpec, argv: Sequence[str], environ: Mapping[str, str], *, is_launch: bool = False) -> int:
    """Starts ``argv`` on all hosts of the spec and stays until their end; returns the exit code.

    ``is_launch``: it is to be read as ``python -m phalanx.launch`` reads it.
    """
    assert spec.host_list is not None
    secret.make()
    environment = forwarded_env.pack(environ, spec.host_list.export)
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
        ways = [find_transport(host, host_list) for host in host_list.hosts]
        self._console = Console()
        self._loop = EventLoop((*spec.signals, "SIGCHLD"))
        self._ways = ways
        self._connections: list[HostConnection] = []
        self._signalled: list[int] = []
        self._shown: set[str] = set()
        self._verdict: str | None = None
        self._has_cause = False
        self._exit_code = 0
        self._end_by: float | None = None
        """When the ones that are left are told to end; set by the first that failed."""
        self._kill_by: float | None = None
        self._beat_at = 0.0

    def drained(self) -> None:
        """The console has written the conductor's own lines; nothing waits for that."""

    def run(self) -> int:
        self._loop.take_signals()
        try:
            self._start_all()
            self._await_answers()
            if not self._signalled:
                self._send_off()
                self._turn_until(lambda: all(connection.is_over for connection in self._connections))
                self._tell_verdict()
            return 128 + self._signalled[0] if self._signalled else self._exit_code
        finally:
            self._loop.restore_signals()
            self._close()

    # ---- bringing them together

    def _start_all(self) -> None:
        if self._host_list.way == "srun":
            names = ", ".join(host.name for host in self._host_list.hosts)
            self._say(f"SLURM gives {len(self._host_list.hosts)} nodes ({names}); starting on all of them with srun")
        for node, way in enumerate(self._ways):
            connection = HostConnection(node, way, self._console, self._loop.resume_pipe, self._hear)
            self._connections.append(connection)
            for stream in connection.streams:
                self._loop.add_pipe(stream)
            connection.send(self._order(node, way))

    def _order(self, node: int, way: Transport) -> wire_protocol.Order:
        first, own = self._ways[0], secret.text()
        assert own is not None
        return wire_protocol.Order(
            argv=self._argv,
            is_launch=self._is_launch,
            directory=str(Path.cwd()),
            environment=self._environment,
            nnodes=len(self._ways),
            secret=own,
            node=node,
            name=way.host.name,
            slots=way.host.slots,
            by_ssh=way.kind == "ssh",
            # Who is not reached by ssh does not learn from ssh by which address; the others may know its name.
            resolve=first.host.name if first.kind != "ssh" and node > 0 else None,
        )

    def _await_answers(self) -> None:
        """Until every host is ready. What is wrong with several is said of all of them."""
        started = time.monotonic()
        patience = started + self._spec.rdzv_timeout

        def is_settled() -> bool:
            nonlocal patience
            waiting = [connection for connection in self._connections if not (connection.hello or connection.refusal)]
            if any(connection.refusal for connection in self._connections):
                patience = min(patience, time.monotonic() + _OTHERS_MAY_ANSWER)
            self._show(f"{len(self._connections) - len(waiting)} of {len(self._connections)} hosts have answered")
            return not waiting or time.monotonic() >= patience or bool(self._signalled)

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

    def _send_off(self) -> None:
        """All fit: they are told where to meet, and start."""
        go = (
            wire_protocol.Go(*compatibility.master(self._connections, self._spec))
            if len(self._connections) > 1
            else wire_protocol.Go()
        )
        self._say(compatibility.roll(self._connections))
        for connection in self._connections:
            connection.send(go)

    # ---- the loop

    def _turn_until(self, done: Callable[[], bool]) -> None:
        while not done():
            for key, _ in self._loop.selector.select(_TICK):
                key.data()
            self._obey_signals()
            self._loop.turn_pipes(stream for connection in self._connections for stream in connection.streams)
            now = time.monotonic()
            if now >= self._beat_at:
                self._beat_at = now + wire_protocol.BEAT_SECONDS
                for connection in self._connections:
                    connection.beat()
            for connection in self._connections:
                connection.flush()
                if not connection.is_over and connection.poll() is not None:
                    self._finish(connection)
            self._end_what_is_left(now)

    def _finish(self, connection: HostConnection) -> None:
        """Its way has ended: what is left in the pipes is read, and its end is understood."""
        deadline = time.monotonic() + _DRAIN_SECONDS  # a program that the user's ssh has started may hold them open
        while not connection.has_drained and time.monotonic() < deadline:
            for stream in connection.streams:
                self._loop.add_pipe(stream)
            for key, _ in self._loop.selector.select(0.1):
                key.data()
        connection.is_over = True
        code = connection.poll()
        assert code is not None
        if connection.hello is None:
            connection.refusal = connection.refusal or connection.way.why_not_started(code, connection.said)
        elif connection.ended_with is None:
            self._fail(connection.way.why_lost(code, connection.said) + "; all hosts are stopped")
            self._end_by = time.monotonic()
        elif connection.ended_with != 0:
            self._exit_code = self._exit_code or connection.ended_with
            if not self._signalled:  # else all are stopping, each in the time that its ranks need
                self._end_by = self._end_by or time.monotonic() + _OTHERS_MAY_END

    def _fail(self, text: str) -> None:
        """The conductor's own reason to end the run. The first reason is the one that is told."""
        self._exit_code = self._exit_code or 1
        if not self._has_cause and self._verdict is None and not self._signalled:
            self._has_cause = True
            self._say(text)

    def _end_what_is_left(self, now: float) -> None:
        left = [connection for connection in self._connections if not connection.is_over]
        if self._end_by is not None and now >= self._end_by and self._kill_by is None:
            self._kill_by = now + self._spec.shutdown_timeout + _LAST_WORDS
            for connection in left:
                connection.send(wire_protocol.PassSignal(int(signal.SIGTERM)))
        if self._kill_by is not None and now >= self._kill_by:
            for connection in left:
                self._fail(f"{connection.name} has not ended in time; its connection is closed")
                connection.kill()  # the remote sees its lifeline end

    # ---- what they say

    def _hear(
        self,
        connection: HostConnection,
        message: wire_protocol.Hello | wire_protocol.Refused | wire_protocol.Ended | wire_protocol.Said,
    ) -> None:
        match message:
            case wire_protocol.Hello():
                connection.greet(message)
            case wire_protocol.Refused(text) if connection.hello is None:
                connection.refusal = f"{connection.name}: {text}"
            case wire_protocol.Refused(text):
                self._fail(f"{connection.name}: {text}")
                self._end_by = time.monotonic()
            case wire_protocol.Ended(code):
                connection.ended_with = code
            case wire_protocol.Said(text, topic):
                self._pass_on(text, topic)

    def _pass_on(self, text: str, topic: wire_protocol.Topic) -> None:
        """Every node says the same, or a consequence of it; a person wants to read it once."""
        if topic == "verdict" and not self._has_cause:
            self._verdict = self._verdict or text  # below the last lines of all nodes
        elif topic == "cause" and not self._has_cause and self._verdict is None:
            self._has_cause = True
            self._say(text)
        elif (topic == "" or (topic == "signal" and self._signalled)) and text not in self._shown:
            self._shown.add(text)
            self._say(text)

    def _tell_verdict(self) -> None:
        if self._verdict is not None:
            while not self._console.flush(0.2) and not self._signalled:
                self._obey_signals()
            self._say(self._verdict)

    # ---- signals

    def _obey_signals(self) -> None:
        while self._loop.signals:
            number = self._loop.signals.pop(0)
            if number == signal.SIGCHLD:
                continue  # it has woken the loop
            self._signalled.append(number)
            for connection in self._connections:
                if len(self._signalled) > 2:
                    connection.kill()  # asked, asked for at once, and still here
                elif not connection.is_over:
                    connection.send(wire_protocol.PassSignal(number))
            self._kill_by = self._kill_by or time.monotonic() + self._spec.shutdown_timeout + _LAST_WORDS

    # ---- the end

    def _show(self, text: str) -> None:
        if self._console.is_terminal[self._console.err]:
            self._console.show_live(self._console.err, f"phalanx: {text}".encode())

    def _say(self, text: str) -> None:
        self._console.put(self, self._console.err, f"phalanx: {text}\n".encode(errors="replace"))

    def _close(self) -> None:
        for connection in self._connections:
            connection.hang_up()
        patience = time.monotonic() + _HANG_UP_SECONDS
        for connection in self._connections:
            connection.close(max(0.0, patience - time.monotonic()) if connection.hello else 0.0)
        self._console.close(timeout=2.0 if self._signalled else None)
        self._loop.close()
