"""The agent's hand on the zygote and the keeper: start, signal, sweep, fresh store.

Every request is a message; what happens to the workers comes back as events. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx import secret
from phalanx.errors import LaunchError
from phalanx.launch import boot
from phalanx.launch.channel import Channel
from phalanx.launch.spec import WorkerSpec


@dataclass(frozen=True)
class Started:
    rank: int
    pid: int
    why_exec: str | None
    """Why it was not forked; None when it was."""


@dataclass(frozen=True)
class Exited:
    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    memory: int = 0
    """Bytes that it had in memory at most, as the kernel says when it is over."""


Event = Started | Exited


class Nursery:
    """One zygote, with its keeper when a listening socket is given."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        start_method: str = "auto",
        preload: Sequence[str] = (),
        late: Sequence[str] = (),
        script_directory: str | None = None,
        listener: socket.socket | None = None,
        with_nodes: bool = False,
    ) -> None:
        """``listener``: what the keeper serves; ``with_nodes``: it also speaks with other nodes."""
        self.token = os.urandom(16).hex()
        self._keeper: Channel | None = None
        self._answers_due = 0
        self.address: tuple[str, int] | None = listener.getsockname()[:2] if listener else None
        """Where the store listens."""
        self._swept = False
        self.ready = False
        """The zygote has imported what it should and takes requests."""
        ours, theirs = Channel.pair()
        self.channel = ours
        self._process = subprocess.Popen(
            boot.command(f"phalanx.launch.zygote.main({theirs.fileno()}, fresh)"),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C on the terminal is for the agent to pass on
            env={**environment, "PHALANX_RUN_TOKEN": self.token, "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        setup = {
            "start_method": start_method,
            "preload": list(preload),
            "late": list(late),
            "script_directory": script_directory,
            "token": self.token,
            "with_nodes": with_nodes,
            "secret": secret.text(),
            # The parent-death signal is bound to the thread that forks, not to the process.
            "die_with": os.getpid() if threading.current_thread() is threading.main_thread() else 0,
        }
        if listener is None and not with_nodes:
            ours.send(setup)
            return
        self._keeper, its_end = Channel.pair()
        ours.send(setup, [its_end.fileno(), *([listener.fileno()] if listener is not None else [])])
        its_end.close()

    @property
    def keeper(self) -> Channel:
        assert self._keeper is not None, "this nursery was made with a keeper"
        return self._keeper

    def fileno(self) -> int:
        return self.channel.fileno()

    def start(self, spec: WorkerSpec, fds: Sequence[int]) -> None:
        """``fds``: stdin, stdout, stderr, the writing end of the report pipe, and what a function needs."""
        environment = {**spec.environment, "PHALANX_RUN_TOKEN": self.token}
        spec = dataclasses.replace(spec, environment=environment)
        self._send({"op": "start", "worker": dataclasses.asdict(spec)}, fds)

    def signal(self, pid: int, number: int) -> None:
        """Only the zygote may signal a worker: it alone knows that the pid has not been given to somebody else."""
        self._send({"op": "signal", "pid": pid, "signal": int(number)})

    def next_event(self) -> Event | None:
        """The next event, waiting for it if there is none; None when it says nothing about a worker."""
        received = self.channel.receive()
        if received is None:
            raise LaunchError(self._epitaph())
        message, _ = received
        match message["event"]:
            case "started":
                return Started(message["rank"], message["pid"], message["exec"])
            case "exited":
                code = os.waitstatus_to_exitcode(message["status"])
                ended = (code, None) if code >= 0 else (None, -code)
                return Exited(message["rank"], message["pid"], *ended, message["memory"])
            case "ready":
                self._check_interpreter(message)
                self.ready = True
            case "swept":
                self._swept = True
            case "import failed":
                raise LaunchError(
                    f"cannot import {message['module']} ({message['error']}) in {sys.executable}; "
                    f"{'install it there' if message['module'].startswith('torch') else 'correct --preload'}."
                )
            case "cannot fork":
                raise LaunchError(f"--start-method fork is not possible: {message['why']}. Use auto or exec.")
            case "keeper ended":
                raise LaunchError(f"the process that hosts the store has ended (wait status {message['status']}).")
        return None

    def _check_interpreter(self, message: Mapping[str, str]) -> None:
        """M17: the workers run in the launcher's own interpreter and environment, or nothing is started."""
        if message["prefix"] != sys.prefix:
            raise LaunchError(
                f"the workers would run in {message['prefix']}, but this launcher runs in {sys.prefix}; "
                "activate one environment and start again."
            )

    def sweep(self) -> list[Event]:
        """Ends whatever the workers left behind; returns what was heard meanwhile."""
        self._swept = False
        self._send({"op": "sweep"})
        heard = []
        while not self._swept:
            event = self.next_event()
            if event is not None:
                heard.append(event)
        return heard

    def fresh_store(self, *, wait: bool) -> None:
        """A new, empty store behind the listening socket.

        The first one need not be waited for: connections made before it is there wait in the backlog. A later one
        must be, or a fast worker would still meet the store of the attempt before.
        """
        assert self._keeper is not None
        self._keeper.send({"op": "fresh"})
        self._answers_due += 1
        while wait and self._answers_due:
            if self._keeper.receive() is None:
                raise LaunchError("the process that hosts the store has ended; all workers are ended.")
            self._answers_due -= 1

    @property
    def has_ended(self) -> bool:
        """The zygote is gone; nothing can be started any more."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """For a start that is called off: there are no workers yet, and the zygote may be busy importing."""
        self._process.kill()

    def close(self) -> None:
        """Ends everything that is left, the zygote included; harmless the second time."""
        self.channel.close()
        with contextlib.suppress(KeyboardInterrupt):
            self._process.wait()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if self._keeper is not None:
            self._keeper.close()

    def _send(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        try:
            self.channel.send(message, fds)
        except OSError:
            raise LaunchError(self._epitaph()) from None

    def _epitaph(self) -> str:
        code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the process that starts the workers (pid {self._process.pid}) was {how}; all workers are ended."
