"""One host as the conductor sees it: the process that leads there, what is sent to it, what it says."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable

from phalanx.errors import LaunchError
from phalanx.launch.output import wire_protocol
from phalanx.launch.output.console import Console
from phalanx.launch.output.logs import OutputPipe, OutputRoute, Tail
from phalanx.launch.process import helper_processes
from phalanx.launch.remote.transports import Transport


class Stream(OutputPipe):
    """Standard output or error of a way; messages among its lines are taken out."""

    def __init__(
        self,
        tail: Tail,
        fd: int,
        console: Console,
        resume: Callable[[OutputPipe], None],
        message_filter: wire_protocol.MessageFilter,
    ) -> None:
        super().__init__(OutputRoute([], tail, fd, b""), console, resume)
        self._cutter = message_filter


class HostConnection:
    """From the start of a way to its end."""

    def __init__(
        self,
        node: int,
        way: Transport,
        console: Console,
        resume: Callable[[OutputPipe], None],
        hear: Callable[
            [HostConnection, wire_protocol.Hello | wire_protocol.Refused | wire_protocol.Ended | wire_protocol.Said],
            None,
        ],
    ) -> None:
        """``hear`` gets the messages of its remote."""
        self.node, self.way, self.name = node, way, way.host.name
        self.hello: wire_protocol.Hello | None = None
        """What the remote told of its machine, when it has."""
        self.ended_with: int | None = None
        """Its own last word: the agent's exit code."""
        self.refusal: str | None = None
        """Why it will not start."""
        self.is_over = False
        self._outbox = b""
        self._tail = Tail()
        inbox = wire_protocol.Inbox(self.name, lambda message: hear(self, message))
        self._sieves = [wire_protocol.MessageFilter(inbox) for _ in range(2)]
        fds = (console.out, console.err)
        self.streams = [
            Stream(self._tail, fd, console, resume, message_filter)
            for fd, message_filter in zip(fds, self._sieves, strict=True)
        ]
        try:
            self._process = subprocess.Popen(
                way.command,
                stdin=subprocess.PIPE,
                stdout=self.streams[0].writer,
                stderr=self.streams[1].writer,
                start_new_session=True,  # a Ctrl-C on the terminal is for the conductor to pass on
            )
        except OSError as error:
            for stream in self.streams:
                stream.close()
            raise LaunchError(f"{way.command[0]} could not be started: {error.strerror}.") from None
        for stream in self.streams:
            stream.close_writer()
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)

    def greet(self, hello: wire_protocol.Hello) -> None:
        """From now on its lines are those of ranks."""
        self.hello = hello
        for message_filter in self._sieves:
            message_filter.is_open = True

    def send(self, message: wire_protocol.Order | wire_protocol.Go | wire_protocol.PassSignal) -> None:
        self._outbox += wire_protocol.line(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the pipe takes; the rest waits for the next turn."""
        if not self._outbox or self._stdin.closed:
            return
        try:
            self._outbox = self._outbox[os.write(self._stdin.fileno(), self._outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it is ending; that comes as an event of its own
            self._outbox = b""

    def beat(self) -> None:
        """A sign of life. None is needed when something else is on its way."""
        if not self._outbox:
            self._outbox = b"\n"
            self.flush()

    def poll(self) -> int | None:
        """The way's exit code; None while it runs."""
        return self._process.poll()

    @property
    def has_drained(self) -> bool:
        return all(stream.ended for stream in self.streams)

    @property
    def said(self) -> list[str]:
        """The last lines that came, of whatever program; without the messages."""
        return [line for line in self._tail.lines(20) if wire_protocol.MARK.decode() not in line]

    def hang_up(self) -> None:
        """Ends the remote's standard input: it ends its ranks, and itself."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def kill(self) -> None:
        self._process.kill()

    def close(self, patience: float) -> None:
        """After its end, or to bring it about: by itself within the seconds of ``patience``."""
        self.hang_up()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            helper_processes.has_ended(self._process, helper_processes.KILL_SECONDS)
        for stream in self.streams:
            stream.close()
