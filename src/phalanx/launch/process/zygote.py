"""The zygote: imports torch once and forks the workers.

A fork copies only the thread that calls it, so the zygote never starts one; it checks that before every fork, and
starts a plain interpreter instead when forking could not be right. It runs no code of the user's but the modules
named by --preload.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import os
import re
import select
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from phalanx import secret
from phalanx.errors import ForeignData
from phalanx.fd_channel import Channel
from phalanx.launch.process import keeper, process_tree, torch_setup, worker
from phalanx.launch.process import zygote_messages as protocol
from phalanx.launch.process.fresh_modules import FreshModules
from phalanx.launch.process.worker import WORKER_SIGNALS
from phalanx.launch.spec.launch_spec import WorkerSpec
from phalanx.system import cgroups, procfs

_TORCH = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch.multiprocessing")
_MOST_SURPLUS = 100
_OF_DRIVERS = re.compile(r"/dev/(nvidia-uvm$|nvmap|nvhost|dxg|kfd|dri/render|davinci)")
"""Files that a process has open once it has initialised CUDA, ROCm, Level Zero or CANN. NVML opens nvidia0 and -ctl."""


def main(fd: int, fresh: frozenset[str]) -> None:
    """The zygote's life; in a forked child it continues as the worker's."""
    fresh_modules = FreshModules(list(sys.path), fresh, dict(os.environ))
    # Job managers often signal every process of a job. Zygote and keeper end when their channels do: if they ended
    # first, the workers would be killed in the middle of their last checkpoint.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in WORKER_SIGNALS}
    channel = Channel.from_fd(fd)
    received = channel.receive(protocol.Setup)
    if received is None:
        os._exit(0)
    setup, fds = received
    secret.keep(setup.secret)
    zygote = _Zygote(channel, fresh_modules, setup, handlers)
    try:
        child = zygote.live(fds)
    except (BrokenPipeError, ForeignData):  # the agent died while it was sent something, or is not one
        zygote.end_everything()
        os._exit(0)
    # Only a child comes here, outside of the zygote's stack, which is not to show up below the script's frames.
    worker.become(child)


@dataclass
class _Zygote:
    channel: Channel
    fresh_modules: FreshModules
    setup: protocol.Setup
    handlers: dict[signal.Signals, Any]
    """The default handlers of the signals that the zygote itself ignores."""
    keeper_pid: int = 0
    workers: dict[int, WorkerSpec] = field(default_factory=dict)
    """The workers that run, by pid."""
    why_not_fork: str | None = None

    def live(self, fds: list[int]) -> worker.Birth:
        """Serves the agent until it goes away. Returns only in a child."""
        if self.setup.die_with:
            process_tree.die_with_parent(self.setup.die_with)  # the channel is not read while importing
        process_tree.adopt_orphans()
        if self.setup.start_method == "exec":
            self.why_not_fork = "asked for"
            self.fresh_modules.note_imports()
        else:
            self._import()
        process_tree.outlive_parent()
        self._start_keeper(fds)
        self.channel.send(protocol.Ready(sys.prefix))
        wake_in, wake_out = os.pipe()
        os.set_blocking(wake_out, False)
        os.set_blocking(wake_in, False)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            readable, _, _ = select.select([self.channel, wake_in], [], [])
            if wake_in in readable:
                os.read(wake_in, 4096)
            self._report_exits()
            if self.channel in readable:
                birth = self._handle_request([wake_in, wake_out])
                if birth is not None:
                    return birth

    def _import(self) -> None:
        gc.disable()  # a tenth of the time of an import goes into collections that find nothing
        for name in (*_TORCH, *self.setup.late, *self.setup.preload):
            directory = self.setup.script_directory if name in self.setup.preload else None
            try:
                with self.fresh_modules.visible(directory):
                    importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 (whatever an import raises, the agent prints it in one line)
                if name in self.setup.late:
                    continue  # only a guess; a script that needs it gets the error itself
                self.channel.send(protocol.ImportFailed(name, f"{type(error).__name__}: {error}"))
                _flush()
                os._exit(1)
        _flush()
        torch_setup.install()
        self.fresh_modules.note_imports()
        gc.freeze()  # a collection in a worker must not touch, and so copy, every page shared with the others
        gc.enable()
        own = procfs.stat("self")
        threads = own.threads if own is not None else 1
        if threads > 1:
            self.why_not_fork = f"{threads - 1} thread(s) were started while importing {', '.join(self.setup.preload)}"
        elif opened := next(filter(_OF_DRIVERS.match, procfs.open_files("self")), None):
            self.why_not_fork = f"{opened} was opened while importing {', '.join(self.setup.preload)}"

    def _start_keeper(self, fds: list[int]) -> None:
        if not fds:
            return
        to_agent, *listeners = fds
        self.keeper_pid = os.fork()
        if self.keeper_pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.channel.close()
            import socket

            listener = socket.socket(fileno=listeners[0]) if listeners else None
            keeper.serve(Channel.from_fd(to_agent), listener, self.setup.token, self.setup.with_nodes)
            os._exit(0)
        for fd in fds:
            os.close(fd)
        self.channel.send(protocol.KeeperStarted(self.keeper_pid))

    def _handle_request(self, wake_fds: list[int]) -> worker.Birth | None:
        received = self.channel.receive(protocol.Request)
        if received is None:
            self.end_everything()
            os._exit(0)
        request, fds = received
        match request:
            case protocol.Start(spec):
                return self._start(spec, fds, wake_fds)
            case protocol.SendSignal(pid, number):
                self._signal(pid, number)
            case protocol.Sweep():
                self.channel.send(protocol.Swept(tuple(sorted(self._sweep()))))
            case protocol.StartKeeper():
                self._start_keeper(fds)
        return None

    def _signal(self, pid: int, number: int) -> None:
        """Signals a worker, or its whole group: a command may be a shell with the real program below it."""
        if pid not in self.workers:
            return
        if self.workers[pid].program.kind == "command":
            with contextlib.suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(pid, number)
                return
        os.kill(pid, number)  # at least a zombie is there: only we reap

    def _start(self, spec: WorkerSpec, fds: list[int], wake_fds: list[int]) -> worker.Birth | None:
        shadow = self.fresh_modules.shadowed_by(self.setup.script_directory)
        why_exec = self._why_exec(spec) or shadow
        if why_exec and spec.start_method == "fork":
            self.channel.send(protocol.CannotFork(why_exec))
            return None
        parent, surplus = os.getpid(), _oom_score_surplus()
        signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)  # the child unblocks them when it is ready
        pid = os.fork()
        if pid == 0:
            procfs.raise_oom_score(surplus)
            signal.set_wakeup_fd(-1)
            for number, handler in {**self.handlers, signal.SIGCHLD: signal.SIG_DFL}.items():
                signal.signal(number, handler)
            self.channel.close()
            for fd in wake_fds:
                os.close(fd)
            return worker.Birth(spec, parent, fds, self.fresh_modules, why_exec is not None, shadow is not None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
        self.workers[pid] = spec
        for fd in fds:
            os.close(fd)
        self.channel.send(protocol.Started(spec.rank, pid, why_exec))
        return None

    def _why_exec(self, spec: WorkerSpec) -> str | None:
        if spec.program.kind == "command":
            return "the program is not Python"
        if spec.program.interpreter is not None:
            return f"the interpreter is {spec.program.interpreter}"
        return self.why_not_fork

    def _report_exits(self) -> None:
        for pid, (status, memory) in process_tree.reap_children().items():
            code = os.waitstatus_to_exitcode(status)
            if pid == self.keeper_pid:
                self.keeper_pid = 0
                self.channel.send(protocol.KeeperEnded(pid, code))
            elif pid in self.workers:
                process_tree.remove_segments([pid])
                rank = self.workers.pop(pid).rank
                ended = (code, None) if code >= 0 else (None, -code)
                self.channel.send(protocol.Exited(rank, pid, *ended, memory))

    def _sweep(self) -> set[int]:
        self._report_exits()
        return process_tree.end_all(lambda: procfs.descendants(os.getpid()) - {self.keeper_pid})

    def end_everything(self) -> None:
        """Ends all descendants, the keeper last: if this process is killed meanwhile, the keeper does the rest."""
        process_tree.end_all(lambda: procfs.descendants(os.getpid()) - {self.keeper_pid})
        process_tree.end_all(lambda: procfs.descendants(os.getpid()))


@functools.cache
def _oom_score_surplus() -> int:
    """The thousandths of the machine's memory that a worker adds to its OOM score.

    Where memory runs out the kernel kills the largest process, and while that ends perhaps the next one: the zygote,
    which has all of torch, and starts the ranks again. The surplus makes a worker larger than the zygote, which could
    lower its own score only with a right that it seldom has in a container.
    """
    limits = [cgroups.allowance().memory, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    memory = min(limit for limit in limits if limit is not None)
    return min(_MOST_SURPLUS, math.ceil(1000 * (procfs.resident(os.getpid()) or 0) / memory))


def _flush() -> None:
    """Writes what modules have printed while they were imported; every child would write it again."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or the module has closed it
                stream.flush()
