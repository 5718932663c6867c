"""The agent's side of the zygote and the keeper: start, signal, sweep, fresh store.

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
from phalanx.launch.process import zygote_messages as protocol
from phalanx.launch.process.helper_processes import HelperLost, StoppedHelpers, how_ended
from phalanx.launch.spec.launch_spec import WorkerSpec
from phalanx.system import procfs

_MESSAGE_SECONDS, _SWEEP_SECONDS, _STORE_SECONDS, _END_SECONDS = 10.0, 20.0, 60.0, 12.0
"""Seconds. The zygote gives up on a process that cannot be killed after 10; the first store may import torch."""


class ZygoteClient:
    """One zygote, with its keeper if a listening socket or other nodes need one."""

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
        """``listener``: the socket that the keeper serves; ``with_nodes``: it also talks to other nodes."""
        self.token = os.urandom(16).hex()
        self.address: tuple[str, int] | None = listener.getsockname()[:2] if listener else None
        """The address of the store."""
        # Kept open here: the port stays ours when the keeper has to be replaced.
        self._listener = listener.dup() if listener is not None else None
        # A module of --preload that asks torch.cuda.is_available() must not initialise CUDA in the zygote.
        self._environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environment}
        self._environment |= {"PHALANX_RUN_TOKEN": self.token, "OPENBLAS_NUM_THREADS": "1"}
        self._setup = protocol.Setup(
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
        """Stores requested from this keeper, and the requests that it has not answered."""
        self.keeper_lost: str | None = None
        """How the keeper has ended; None while it runs."""
        self.left: set[int] = set()
        """Processes of the run that even SIGKILL has not ended."""
        self._stopped = StoppedHelpers()
        self._start_zygote()

    def _start_zygote(self) -> None:
        self._swept = self.ready = False
        """``ready``: the zygote has imported what it should and takes requests."""
        self._workers: set[int] = set()
        """The pids of those that have started and not ended."""
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

    def _send_with_keeper(self, message: protocol.Setup | protocol.StartKeeper) -> None:
        """Sends the message with what a new keeper needs, if there is one: its channel and the socket."""
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
        """Starts the zygote, the keeper or both again, after everything of the attempt has ended."""
        if self._keeper is not None and (self.keeper_lost or self._keeper.has_ended):
            self._keeper.close()
            self._keeper = None
        self.keeper_lost = None
        if self.has_ended:
            self._start_zygote()
        elif self._keeper is None:
            self._send_with_keeper(protocol.StartKeeper())

    @property
    def keeper(self) -> Channel:
        assert self._keeper is not None, "this zygote was started with a keeper"
        return self._keeper

    def fileno(self) -> int:
        return self.channel.fileno()

    def start(self, spec: WorkerSpec, fds: Sequence[int]) -> None:
        """``fds``: stdin, stdout, stderr, the writing end of the report pipe, and what a function needs."""
        environment = {**spec.environment, "PHALANX_RUN_TOKEN": self.token}
        self._send(protocol.Start(messages.replace(spec, environment=environment)), fds)

    def signal(self, pid: int, number: int) -> None:
        """Only the zygote may signal a worker: it alone knows that the pid has not been given to somebody else."""
        self._send(protocol.SendSignal(pid, int(number)))

    def next_event(self) -> protocol.Started | protocol.Exited | None:
        """Waits for the next event and returns it; None when it is not about a worker."""
        try:
            received = self.channel.receive(protocol.Event)
        except ForeignData as error:
            raise HelperLost(str(error)) from None
        if received is None:
            raise HelperLost(helper_processes.describe_end(self._process))
        event, _ = received
        match event:
            case protocol.Started():
                self._workers.add(event.pid)
                return event
            case protocol.Exited():
                self._workers.discard(event.pid)
                return event
            case protocol.Ready(prefix):
                if prefix != sys.prefix:
                    raise LaunchError(
                        f"the workers would run in {prefix}, but this launcher runs in {sys.prefix}; "
                        "activate one environment and start again."
                    )
                self.ready = True
            case protocol.Swept(left):
                self._swept = True
                self.left |= set(left)
            case protocol.KeeperStarted(pid):
                self._keeper_pid = pid
            case protocol.ImportFailed(module, error):
                raise LaunchError(
                    f"cannot import {module} ({error}) in {sys.executable}; "
                    f"{'install it there' if module.startswith('torch') else 'correct --preload'}."
                )
            case protocol.CannotFork(why):
                raise LaunchError(f"--start-method fork is not possible: {why}. Use auto or exec.")
            case protocol.KeeperEnded(pid, code) if pid == self._keeper_pid:
                how = how_ended(code)
                self.keeper_lost = f"the process that hosts the store (pid {self._keeper_pid}) was {how}"
                if self._setup.with_nodes:
                    raise LaunchError(f"{self.keeper_lost}; all workers are ended.")
        return None

    def sweep(self) -> list[protocol.Started | protocol.Exited]:
        """Ends the processes that workers left behind; returns the events of that time. See ``left``."""
        self._swept = False
        self._send(protocol.Sweep())
        found = []
        while not self._swept:
            self._await(self.channel, _SWEEP_SECONDS, f"the process that starts the workers (pid {self.pid})")
            event = self.next_event()
            if event is not None:
                found.append(event)
        return found

    def fresh_store(self) -> None:
        """Has the keeper put a new, empty store behind the listening socket.

        The first one of a keeper is not waited for: connections made before wait in the backlog. A later one is, or a
        fast worker would still reach the store of the attempt before.
        """
        name = f"the process that hosts the store (pid {self._keeper_pid})"
        try:
            self.keeper.send(protocol.FreshStore())
            self._stores += 1
            self._answers_due += 1
            while self._stores > 1 and self._answers_due:
                self._await(self.keeper, _STORE_SECONDS, name)
                if self.keeper.receive(protocol.FreshStore) is None:
                    raise HelperLost(f"{name} has ended")
                self._answers_due -= 1
        except (OSError, HelperLost, ForeignData) as error:
            self.keeper_lost = str(error) if not isinstance(error, OSError) else f"{name} has ended"
            if not self._keeper_pid and helper_processes.has_ended(self._process, helper_processes.KILL_SECONDS):
                self.keeper_lost = helper_processes.describe_end(self._process)  # before it could start the keeper
            self.keeper.close()
            if procfs.stat(self._keeper_pid) is not None:  # it hangs
                with contextlib.suppress(ProcessLookupError):  # it has just ended after all
                    os.kill(self._keeper_pid, signal.SIGKILL)
            raise HelperLost(self.keeper_lost) from None

    def _await(self, channel: Channel, seconds: float, name: str) -> None:
        """Waits until something can be read; continues the helpers if they are stopped."""
        helper_processes.wait(
            lambda second: select.select([channel], [], [], second)[0], seconds, name, self.check_helpers
        )

    def check_helpers(self, *, at_once: bool = False) -> list[str]:
        """Continues the zygote and the keeper when they are stopped; returns a sentence for each.

        It also notices the end of a keeper that has outlived its zygote.
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
        """Whether the zygote has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kills the zygote, which may be busy importing; there must be no workers yet."""
        self._process.kill()

    def abort(self) -> None:
        """Kills the zygote and all that it has started. See ``left``."""
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
        """Closes the keeper's channel and waits for its end; returns whether it came."""
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
