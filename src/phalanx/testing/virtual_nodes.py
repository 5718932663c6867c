"""Hosts on one machine, for tests of what crosses a network.

    from phalanx.testing import virtual_nodes

    def test_training_survives_a_cut():
        with virtual_nodes(2, bandwidth="1gbit") as nodes:
            ranks = [node.start([sys.executable, "train.py"], env={"RANK": str(i)}) for i, node in enumerate(nodes)]
            nodes.cut(1)

A fixture, for a conftest.py:

    @pytest.fixture
    def nodes():
        with virtual_nodes(3) as nodes:
            yield nodes

Each node has its own network, host name, /etc/hosts, processes and shared memory; files and users are the machine's.
The machine's own network is never touched. When the block is left, or the process that made them ends in any way,
everything is gone (how: namespaces.py). It takes root, Linux 5.8 or newer, and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from phalanx.errors import UsageError
from phalanx.testing import namespaces
from phalanx.testing.virtual_links import VirtualLinks
from phalanx.testing.warden import SECONDS_TO_END, Warden, script

_MOST = 100  # more would not fit into one message to the warden; nobody has asked


class Node:
    """One host, made by `VirtualNodes`."""

    def __init__(self, name: str, address: str, holder: int) -> None:
        self.name = name
        """Its host name."""
        self.address = address
        """The address of its interface eth0."""
        self._holder: int | None = holder  # a pidfd: a pid could be somebody else's by now
        self._programs: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}{'' if self.is_up else ', stopped'}>"

    @property
    def is_up(self) -> bool:
        return self._holder is not None

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        timeout: float | None = 60.0,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the node, to its end, and returns its exit code and output.

        Args:
            timeout: seconds after which it is killed, with its process group, and subprocess.TimeoutExpired is raised.
            input: its standard input; empty by default.
            env: variables to set, on top of those of this process.
            cwd: default: the directory of this process.
            check: raise subprocess.CalledProcessError for any exit code but 0.
        """
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(command, env=env, cwd=cwd, **pipes) as program:
            try:
                out, err = program.communicate(input or "", timeout)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)  # a child of it would hold the pipes open
                raise
        done = subprocess.CompletedProcess(list(command), program.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def start(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Starts a command on the node; it is a child of this process, so signals and exit codes are the program's own.

        By default it talks text and has a session of its own; a program that cannot be executed ends with code 127.
        Programs that run on when the block is left are killed.

        Args:
            env: variables to set, on top of those of this process.
            cwd: default: the directory of this process.
            options: of subprocess.Popen.
        """
        if self._holder is None:
            raise UsageError(f"{self.name} has been stopped: nothing can be started there; make new virtual nodes.")
        way_in = script("enter", self._holder, cwd or Path.cwd(), *command)
        options = {"text": True, "start_new_session": True, **options}
        options["pass_fds"] = (*options.get("pass_fds", ()), self._holder)
        home = os.pidfd_open(os.getpid())
        try:
            # A pid namespace is entered by being born there: for now the children of this thread are.
            namespaces.join(self._holder, namespaces.PID)
            program = subprocess.Popen(way_in, env={**os.environ, **(env or {})}, **options)
        finally:
            namespaces.join(home, namespaces.PID)
            os.close(home)
        with self._lock:
            self._programs = [*(each for each in self._programs if each.poll() is None), program]
        return program

    def _kill(self) -> None:
        """Kills all its processes at once; they are gone when this returns."""
        if self._holder is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._holder, signal.SIGKILL)
            self._reap()
            # A pid 1 has ended when the last process of its namespace has.
            namespaces.poll(self._holder, seconds=SECONDS_TO_END)
            self._forget()

    def _reap(self) -> None:
        """Reaps our children: as long as one is a zombie, its namespace is not gone."""
        for program in self._programs:
            program.wait()

    def _forget(self) -> None:
        if self._holder is not None:
            os.close(self._holder)
            self._holder = None


class VirtualNodes(Sequence[Node]):
    """The hosts and the network between them; `virtual_nodes` makes it. Nodes are named by their index."""

    def __init__(self, n: int, loopback_names: bool = False) -> None:
        _check(n)
        names = [f"node{i}" for i in range(n)]
        addresses = [f"10.77.0.{i + 1}" for i in range(n)]
        self._warden = Warden([(name, _hosts(i, names, addresses, loopback_names)) for i, name in enumerate(names)])
        self._nodes = [Node(*each) for each in zip(names, addresses, self._warden.holders, strict=True)]
        try:
            self._links = VirtualLinks(self._warden.order, addresses, self._warden.pids)
        except BaseException:
            self.close()
            raise

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Node]: ...
    def __getitem__(self, index: int | slice) -> Node | Sequence[Node]:
        return self._nodes[index]

    def __len__(self) -> int:
        return len(self._nodes)

    def cut(self, node: int, direction: Literal["both", "in", "out"] = "both") -> None:
        """Drops everything that the node sends (``out``) or should receive (``in``); no connection is closed."""
        if direction not in ("both", "in", "out"):
            raise UsageError(f"a link has no direction {direction!r}; it is both, in or out.")
        self._links.cut(self._running(node), direction)

    def restore(self, node: int) -> None:
        """Undoes every cut of the node; a partition and the bandwidth stay."""
        self._links.restore(self._running(node))

    def partition(self, *groups: Sequence[int]) -> None:
        """Only nodes of one group reach each other; those that no group names are one more. Replaces an earlier one."""
        named = [node for group in groups for node in group]
        if len(set(named)) < len(named):
            raise UsageError(f"a node can be in one group only, not {list(map(list, groups))}.")
        rest = [i for i in self._up() if i not in named]
        self._links.partition([*([self._running(i) for i in group] for group in groups), rest])

    def heal(self) -> None:
        """Undoes the partition; cuts stay."""
        self._links.partition([self._up()])

    def shape(self, bandwidth: str | None) -> None:
        """The bandwidth of every link, each way, such as ``100mbit``; None: as fast as the machine is."""
        self._links.shape(bandwidth)

    def stop(self, node: int) -> None:
        """Simulates a power loss: its processes are gone at once, no connection is closed, and it does not return."""
        self._links.cut(self._running(node), "both")  # first: the dying sockets must not say good-bye
        self._nodes[node]._kill()
        self._links.forget(node)

    def _up(self) -> list[int]:
        return [i for i, node in enumerate(self._nodes) if node.is_up]

    def _running(self, node: int) -> int:
        if not 0 <= node < len(self._nodes):
            raise UsageError(f"there is no node {node}: they go from 0 to {len(self._nodes) - 1}.")
        if not self._nodes[node].is_up:
            raise UsageError(f"node {node} has been stopped; make new virtual nodes.")
        return node

    def close(self) -> None:
        """Ends everything; leaving the block does."""
        self._warden.end()
        for node in self._nodes:
            node._reap()
            node._forget()
        self._warden.wait()


def _check(n: int) -> None:
    if not sys.platform.startswith("linux"):
        raise UsageError(f"virtual nodes are made of Linux namespaces; this is {sys.platform}.")
    if os.geteuid() != 0:
        raise UsageError(
            f"virtual nodes need root, and this process runs as user {os.geteuid()}; run the tests as root."
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UsageError(f"virtual nodes need the command {tool}, which was not found; install iproute2.")
    if not 1 <= n <= _MOST:
        raise UsageError(f"{n} virtual nodes cannot be made: 1 to {_MOST} can.")


def _hosts(own: int, names: Sequence[str], addresses: Sequence[str], loopback_names: bool) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for i, (name, address) in enumerate(zip(names, addresses, strict=True)):
        lines.append(f"{'127.0.1.1' if loopback_names and i == own else address} {name}")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def virtual_nodes(n: int, bandwidth: str | None = None, *, loopback_names: bool = False) -> Iterator[VirtualNodes]:
    """Makes ``n`` hosts on this machine, joined by a switch: ``node0`` at 10.77.0.1, ``node1`` at 10.77.0.2, …

    Args:
        bandwidth: of every link, each way, such as ``1gbit``; None: as fast as the machine is.
        loopback_names: a node's own name leads to 127.0.1.1, as Debian's installer has it, not to its address.
    """
    nodes = VirtualNodes(n, loopback_names)
    try:
        nodes.shape(bandwidth)
        yield nodes
    finally:
        nodes.close()
