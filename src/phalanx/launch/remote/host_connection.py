"""One host as the conductor sees it: the process of its transport, the messages to it, its output."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable

from phalanx import messages
from phalanx.errors import LaunchError
from phalanx.launch.output import wire_protocol
from phalanx.launch.output.console import Console
from phalanx.launch.output.line_splitter import Tail
from phalanx.launch.output.logs import OutputPipe, OutputRoute
from phalanx.launch.process import helper_processes
from phalanx.launch.remote.transports import Transport


class HostConnection:
    """The connection to the agent of one host, from start to end."""

    def __init__(
        self,
        node: int,
        transport: Transport,
        console: Console,
        resume: Callable[[OutputPipe], None],
        receive: Callable[[HostConnection, wire_protocol.FromHost], None],
    ) -> None:
        """``receive`` gets the messages of the host."""
        self.node, self.transport, self.name = node, transport, transport.host.name
        self.hello: wire_protocol.Hello | None = None
        """The host's answer."""
        self.ended_with: int | None = None
        """The agent's exit code, which is its last message."""
        self.refusal: str | None = None
        """The reason why it cannot start."""
        self.is_over = False
        self._outbox = b""
        self._tail = Tail()
        inbox = wire_protocol.Inbox(self.name, lambda message: receive(self, message))
        self._filters = [wire_protocol.MessageFilter(inbox) for _ in range(2)]
        self.streams = [
            OutputPipe(OutputRoute([], self._tail, fd, None), console, resume, splitter)
            for fd, splitter in zip((console.out, console.err), self._filters, strict=True)
        ]
        try:
            self.process = subprocess.Popen(
                transport.command,
                stdin=subprocess.PIPE,
                stdout=self.streams[0].writer,
                stderr=self.streams[1].writer,
                start_new_session=True,  # a Ctrl-C on the terminal is for the conductor to pass on
            )
        except OSError as error:
            for stream in self.streams:
                stream.close()
            raise LaunchError(f"{transport.command[0]} could not be started: {error.strerror}.") from None
        for stream in self.streams:
            stream.close_writer()
        assert self.process.stdin is not None
        self._stdin = self.process.stdin
        os.set_blocking(self._stdin.fileno(), False)

    def accept(self, hello: wire_protocol.Hello) -> None:
        """Keeps the answer. Lines that follow it are those of ranks."""
        self.hello = hello
        for message_filter in self._filters:
            message_filter.is_open = True

    def send(self, message: wire_protocol.Order | wire_protocol.Go | wire_protocol.PassSignal) -> None:
        self._outbox += messages.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what the pipe takes now."""
        if not self._outbox or self._stdin.closed:
            return
        try:
            self._outbox = self._outbox[os.write(self._stdin.fileno(), self._outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it is ending, as `process` shows
            self._outbox = b""

    def beat(self) -> None:
        """Sends a heartbeat, unless other data is waiting to be sent."""
        if not self._outbox:
            self._outbox = b"\n"
            self.flush()

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its output, without the messages."""
        return [line for line in self._tail.lines(20) if wire_protocol.MARK.decode() not in line]

    def close_lifeline(self) -> None:
        """Closes the standard input of the agent there, which then ends its ranks and itself."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def close(self, timeout: float) -> None:
        """Ends the transport, which has ``timeout`` seconds to end by itself."""
        self.close_lifeline()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            helper_processes.has_ended(self.process, helper_processes.KILL_SECONDS)
        for stream in self.streams:
            stream.close()
