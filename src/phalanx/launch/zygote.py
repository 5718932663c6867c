"""The zygote: imports torch once and forks the workers.

A fork copies only the thread that calls it, so the zygote never starts one; it checks that before every fork, and
starts a plain interpreter instead when forking could not be right. It runs no code of the user's but the modules
named by --preload.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch import keeper, orphans, worker
from phalanx.launch.channel import Channel
from phalanx.launch.disguise import Disguise
from phalanx.launch.spec import WorkerSpec

_TORCH = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch.multiprocessing")


def main(fd: int) -> None:
    """The zygote's life; in a forked child it goes on as the worker's."""
    disguise = Disguise.of_this_interpreter()
    channel = Channel.from_fd(fd)
    received = channel.receive()
    if received is None:
        os._exit(0)
    setup, fds = received
    child = _Zygote(channel, disguise, setup).live(fds)
    # Only a child comes here, out of the zygote's stack, so that the script's frames have nothing of it below them.
    worker.become(child)


@dataclass
class _Zygote:
    channel: Channel
    disguise: Disguise
    setup: dict[str, Any]
    keeper_pid: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    """pid to rank, of the workers that run."""
    why_not_fork: str | None = None

    def live(self, fds: list[int]) -> worker.Birth:
        """Serves the agent until it goes away. Returns only in a child."""
        if self.setup["die_with"]:
            orphans.die_with_parent(self.setup["die_with"])  # while importing, nobody reads the channel
        orphans.adopt_orphans()
        if self.setup["start_method"] == "exec":
            self.why_not_fork = "asked for"
        else:
            self._import()
        orphans.outlive_parent()
        self._start_keeper(fds)
        self.channel.send({"event": "ready", "prefix": sys.prefix, "executable": sys.executable})
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
                birth = self._obey([wake_in, wake_out])
                if birth is not None:
                    return birth

    def _import(self) -> None:
        gc.disable()  # a tenth of the time of an import goes into collections that find nothing
        for name in (*_TORCH, *self.setup["preload"]):
            directory = None if name in _TORCH else self.setup["script_directory"]
            try:
                with self.disguise.visible(directory):
                    importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 (whatever an import raises, the agent says it in one line)
                self.channel.send(
                    {"event": "import failed", "module": name, "error": f"{type(error).__name__}: {error}"}
                )
                os._exit(1)
        self.disguise.note_imports()
        gc.freeze()  # a collection in a worker must not touch, and so copy, every page shared with the others
        gc.enable()
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        if threads > 1:
            self.why_not_fork = (
                f"{threads - 1} thread(s) were started while importing {', '.join(self.setup['preload'])}"
            )
        elif sys.modules["torch"].cuda.is_initialized():
            self.why_not_fork = "CUDA was initialised while importing"

    def _start_keeper(self, fds: list[int]) -> None:
        if not fds:
            return
        to_agent, listener = fds
        self.keeper_pid = os.fork()
        if self.keeper_pid == 0:
            self.channel.close()
            import socket

            keeper.serve(Channel.from_fd(to_agent), socket.socket(fileno=listener), self.setup["token"])
            os._exit(0)
        os.close(to_agent)
        os.close(listener)

    def _obey(self, wake_fds: list[int]) -> worker.Birth | None:
        received = self.channel.receive()
        if received is None:
            self._end_everything()
            os._exit(0)
        message, fds = received
        if message["op"] == "start":
            return self._start(WorkerSpec.from_fields(message["worker"]), fds, wake_fds)
        if message["op"] == "signal":
            if message["pid"] in self.ranks:
                os.kill(message["pid"], message["signal"])
        elif message["op"] == "sweep":
            self._sweep()
            self.channel.send({"event": "swept"})
        else:
            raise AssertionError(f"the agent sent {message['op']!r}")
        return None

    def _start(self, spec: WorkerSpec, fds: list[int], wake_fds: list[int]) -> worker.Birth | None:
        why_exec = self._why_exec(spec)
        if why_exec and spec.start_method == "fork":
            self.channel.send({"event": "cannot fork", "why": why_exec})
            return None
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.channel.close()
            for fd in wake_fds:
                os.close(fd)
            return worker.Birth(spec, parent, fds, self.disguise, by_exec=why_exec is not None)
        self.ranks[pid] = spec.rank
        for fd in fds:
            os.close(fd)
        self.channel.send({"event": "started", "rank": spec.rank, "pid": pid, "exec": why_exec})
        return None

    def _why_exec(self, spec: WorkerSpec) -> str | None:
        if spec.program.kind == "command":
            return "the program is not Python"
        if spec.program.interpreter is not None:
            return f"the interpreter is {spec.program.interpreter}"
        return self.why_not_fork or self.disguise.shadowed_by(self.setup["script_directory"])

    def _report_exits(self) -> None:
        for pid, status in orphans.reap_children().items():
            if pid == self.keeper_pid:
                self.keeper_pid = 0
                self.channel.send({"event": "keeper ended", "status": status})
            elif pid in self.ranks:
                orphans.remove_segments([pid])
                self.channel.send({"event": "exited", "rank": self.ranks.pop(pid), "pid": pid, "status": status})

    def _sweep(self) -> None:
        self._report_exits()
        orphans.end_all(lambda: orphans.descendants(os.getpid()) - {self.keeper_pid})

    def _end_everything(self) -> None:
        self.keeper_pid, keeper_pid = 0, self.keeper_pid
        if keeper_pid:
            os.kill(keeper_pid, signal.SIGKILL)
        orphans.end_all(lambda: orphans.descendants(os.getpid()))
