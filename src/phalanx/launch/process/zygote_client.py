"""The agent's hand on the zygote and the keeper: start, signal, sweep, fresh store.

Every request is a message; what happens to the workers comes back as events. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from phalanx import messages, secret
from phalanx.entry_point import python_command
from phalanx.errors import ForeignData, LaunchError
from phalanx.fd_channel import Channel
from phalanx.launch.process import helper_processes
from phalanx.launch.process.helper_processes import HelperLost, how_ended
from phalanx.launch.process.zygote_messages import (
    CannotFork,
    Event,
    Exited,
    FreshStore,
    ImportFailed,
    KeeperEnded,
    KeeperStarted,
    Ready,
    SendSignal,
    Setup,
    Start,
    Started,
    StartKeeper,
    Sweep,
    Swept,
)
from phalanx.launch.spec.launch_spec import WorkerSpec
from phalanx.system import procfs

_MESSAGE_SECONDS, _SWEEP_SECONDS, _STORE_SECONDS, _END_SECONDS = 10.0, 20.0, 60.0, 12.0
"""The zygote gives up on a process that cannot be killed after 10 s; the first store may have to import torch."""


class ZygoteClient:
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
        self.address: tuple[str, int] | None = listener.getsockname()[:2] if listener else None
        """Where the store listens."""
        # Kept open here: the port stays ours when the keeper has to be replaced.
        self._listener = listener.dup() if listener is not None else None
        self._environment = {**environment, "PHALANX_RUN_TOKEN": self.token, "OPENBLAS_NUM_THREADS": "1"}
        self._setup = Setup(
            start_method,
            tuple(preload),
            tuple(late),
            script_directory,
            self.token,
            with_nodes,
            secret.text(),
            # The parent-death signal is bound to the thread that forks, not to the process.
            die_with=os.getpid() if threading.current_thread() is threading.main_thread() else 0,
        )
        self._keeper: Channel | None = None
        self._keeper_pid = 0
        self._stores = self._answers_due = 0
        """Asked of this keeper, and those of them that it has not answered."""
        self.keeper_lost: str | None = None
        """How the keeper has ended, until a new one is started."""
        self.left: set[int] = set()
        """Processes of the run that even SIGKILL has not ended."""
        self._stopped = helper_processes.Stopped()
        self._start_zygote()

    def _start_zygote(self) -> None:
        self._swept = self.ready = False
        """``ready``: the zygote has imported what it should and takes requests."""
        self._workers: set[int] = set()
        """Those that have started and not ended, by pid."""
        self.channel, theirs = Channel.pair()
        self.channel.limit(_MESSAGE_SECONDS)
        self._process = subprocess.Popen(
            python_command(f"phalanx.launch.process.zygote.main({theirs.fileno()}, fresh)"),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C on the terminal is for the agent to pass on
            env=self._environment,
        )
        theirs.close()
        if self._keeper is None:
            self._send_with_keeper(self._setup)
        else:
            self._send(self._setup)

    def _send_with_keeper(self, message: Setup | StartKeeper) -> None:
        """With what a new keeper needs: its channel and the socket, if this zygote has one."""
        if self._listener is None and not self._setup.with_nodes:
            self._send(message)
            return
        self._keeper, its_end = Channel.pair()
        self._keeper.limit(_MESSAGE_SECONDS)
        self._keeper_pid = self._stores = self._answers_due = 0
        try:
            self._send(message, [its_end.fileno(), *([self._listener.fileno()] if self._listener else [])])
        finally:
            its_end.close()

    def restart(self) -> None:
        """Starts what has ended, the zygote or the keeper or both, after everything of the attempt has been ended."""
        if self._keeper is not None and (self.keeper_lost or self._keeper.has_ended):
            self._keeper.close()
            self._keeper = None
        self.keeper_lost = None
        if self.has_ended:
            self._start_zygote()
        elif self._keeper is None:
            self._send_with_keeper(StartKeeper())

    @property
    def keeper(self) -> Channel:
        assert self._keeper is not None, "this zygote was started with a keeper"
        return self._keeper

    def fileno(self) -> int:
        return self.channel.fileno()

    def start(self, spec: WorkerSpec, fds: Sequence[int]) -> None:
        """``fds``: stdin, stdout, stderr, the writing end of the report pipe, and what a function needs."""
        environment = {**spec.environment, "PHALANX_RUN_TOKEN": self.token}
        self._send(Start(messages.replace(spec, environment=environment)), fds)

    def signal(self, pid: int, number: int) -> None:
        """Only the zygote may signal a worker: it alone knows that the pid has not been given to somebody else."""
        self._send(SendSignal(pid, int(number)))

    def next_event(self) -> Started | Exited | None:
        """The next event, waiting for it if there is none; None when it says nothing about a worker."""
        try:
            received = self.channel.receive(Event)
        except ForeignData as error:
            raise HelperLost(str(error)) from None
        if received is None:
            raise HelperLost(helper_processes.describe_end(self._process))
        event, _ = received
        match event:
            case Started():
                self._workers.add(event.pid)
                return event
            case Exited():
                self._workers.discard(event.pid)
                return event
            case Ready():
                self._check_interpreter(event.prefix)
                self.ready = True
            case Swept(left):
                self._swept = True
                self.left |= set(left)
            case KeeperStarted(pid):
                self._keeper_pid = pid
            case ImportFailed(module, error):
                raise LaunchError(
                    f"cannot import {module} ({error}) in {sys.executable}; "
                    f"{'install it there' if module.startswith('torch') else 'correct --preload'}."
                )
            case CannotFork(why):
                raise LaunchError(f"--start-method fork is not possible: {why}. Use auto or exec.")
            case KeeperEnded(pid, code) if pid == self._keeper_pid:
                how = how_ended(code)
                self.keeper_lost = f"the process that hosts the store (pid {self._keeper_pid}) was {how}"
                if self._setup.with_nodes:
                    raise LaunchError(f"{self.keeper_lost}; all workers are ended.")
        return None

    def _check_interpreter(self, prefix: str) -> None:
        """The workers run in the launcher's own interpreter and environment, or nothing is started."""
        if prefix != sys.prefix:
            raise LaunchError(
                f"the workers would run in {prefix}, but this launcher runs in {sys.prefix}; "
                "activate one environment and start again."
            )

    def sweep(self) -> list[Started | Exited]:
        """Ends whatever the workers left behind; returns what was heard meanwhile. See ``left``."""
        self._swept = False
        self._send(Sweep())
        heard = []
        while not self._swept:
            self._await(self.channel, _SWEEP_SECONDS, f"the process that starts the workers (pid {self.pid})")
            event = self.next_event()
            if event is not None:
                heard.append(event)
        return heard

    def fresh_store(self) -> None:
        """A new, empty store behind the listening socket.

        The first one of a keeper need not be waited for: connections made before it is there wait in the backlog. A
        later one must be, or a fast worker would still meet the store of the attempt before.
        """
        name = f"the process that hosts the store (pid {self._keeper_pid})"
        try:
            self.keeper.send(FreshStore())
            self._stores += 1
            self._answers_due += 1
            while self._stores > 1 and self._answers_due:
                self._await(self.keeper, _STORE_SECONDS, name)
                if self.keeper.receive(FreshStore) is None:
                    raise HelperLost(f"{name} has ended")
                self._answers_due -= 1
        except (OSError, HelperLost, ForeignData) as error:
            self.keeper_lost = str(error) if not isinstance(error, OSError) else f"{name} has ended"
            if not self._keeper_pid and helper_processes.has_ended(self._process, helper_processes.KILL_SECONDS):
                self.keeper_lost = helper_processes.describe_end(self._process)  # before it could start the keeper
            self.keeper.close()
            if procfs.stat(self._keeper_pid) is not None:  # it is silent
                with contextlib.suppress(ProcessLookupError):  # it has just ended after all
                    os.kill(self._keeper_pid, signal.SIGKILL)
            raise HelperLost(self.keeper_lost) from None

    def _await(self, channel: Channel, seconds: float, name: str) -> None:
        """Until something can be read from it. A process that is stopped is continued, since it is needed."""
        helper_processes.wait(
            lambda second: select.select([channel], [], [], second)[0], seconds, name, self.check_helpers
        )

    def check_helpers(self, *, at_once: bool = False) -> list[str]:
        """Continues the zygote and the keeper when they are stopped, and returns what there is to say of it.

        A keeper that has outlived its zygote has nobody else to notice its end.
        """
        if self._keeper is not None and not self.keeper_lost and self._keeper.has_ended:
            self.keeper_lost = f"the process that hosts the store (pid {self._keeper_pid}) has ended"
        names = {self.pid: "starts the workers", self._keeper_pid: "hosts the store"}
        return self._stopped.resume({pid: name for pid, name in names.items() if pid}, at_once=at_once)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """The zygote is gone; nothing can be started any more."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """For a start that is called off: there are no workers yet, and the zygote may be busy importing."""
        self._process.kill()

    def abort(self) -> None:
        """Ends the zygote and all that it has started without its help; ``left`` says what cannot be ended."""
        self.channel.close()
        spared = {*self.left, *([self._keeper_pid] if self._keeper is not None else [])}
        self.left |= helper_processes.end_with(self._process, self.token, spared, self._workers)
        self._workers.clear()

    def close(self) -> None:
        """Ends everything that is left, the zygote included; harmless the second time."""
        self.channel.close()
        with contextlib.suppress(KeyboardInterrupt, HelperLost):
            limit = 0.0 if self.left else _END_SECONDS
            helper_processes.wait(
                partial(helper_processes.has_ended, self._process), limit, "the zygote", self.check_helpers
            )
        is_in_order = self._end_keeper() if self._process.poll() is not None and not self.left else False
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self._process.poll() != 0 or not is_in_order:  # else it has ended everything
            self.abort()
        if self._listener is not None:
            self._listener.close()

    def _end_keeper(self) -> bool:
        """The zygote ends it with itself, unless that was replaced: then it ends by itself. Whether it has."""
        if self._keeper is None:
            return True
        self._keeper.end()
        with contextlib.suppress(HelperLost, OSError):
            while not self._keeper.has_ended:
                self._await(self._keeper, _END_SECONDS, "the keeper")
                self._keeper.receive(dict)
        return self._keeper.has_ended

    def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        try:
            self.channel.send(message, fds)
        except OSError:
            raise HelperLost(helper_processes.describe_end(self._process)) from None
