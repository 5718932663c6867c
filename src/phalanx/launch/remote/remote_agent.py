"""The agent of a host that a conductor has started: checks what the run needs here, then runs this node's agent.

Orders come through standard input, which stays open as the lifeline: when it ends, or there is no heartbeat of the
conductor any more, this node's ranks are ended.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NoReturn, TypeVar

from phalanx import messages, secret
from phalanx.errors import ForeignData, PhalanxError, UsageError
from phalanx.launch.output import wire_protocol
from phalanx.launch.spec import network, preflight
from phalanx.launch.spec.launch_spec import LaunchSpec

T = TypeVar("T")
Overrides = dict[str, str | int | None]
Parse = Callable[..., tuple[LaunchSpec, bool]]
Run = Callable[[LaunchSpec, Mapping[str, str]], int]


def main(parse: Parse, run: Run) -> NoReturn:
    """Runs the agent of this host and exits with its code. ``parse`` reads its command line, ``run`` is the agent."""
    lifeline = Lifeline()
    order = lifeline.next_message(wire_protocol.Order)
    if order is None:
        sys.exit(1)
    secret.keep(order.secret)
    try:
        spec = _prepare(order, parse)
        _send(_hello(order, spec), order.name)
    except PhalanxError as error:
        _send(wire_protocol.Refused(str(error)), order.name)
        sys.exit(2)
    go = lifeline.next_message(wire_protocol.Go)
    if go is None:  # the conductor has ended
        sys.exit(1)
    if go.master_addr is not None:
        spec = messages.replace(spec, master_addr=go.master_addr, master_port=go.master_port)
    threading.Thread(target=lifeline.pass_signals, name="lifeline", daemon=True).start()
    sys.exit(_run(spec, order.name, run))


def _run(spec: LaunchSpec, node: str, run: Run) -> int:
    try:
        code = run(spec, os.environ)
    except PhalanxError as error:
        _send(wire_protocol.Refused(str(error)), node)
        code = 2
    except KeyboardInterrupt:  # before the agent could take it as its own
        code = 128 + signal.SIGINT
    _send(wire_protocol.Ended(code), node)
    return code


def _prepare(order: wire_protocol.Order, parse: Parse) -> LaunchSpec:
    """Gives this process the directory, the variables and the command line of the conductor."""
    try:
        os.chdir(order.directory)
    except OSError as error:
        raise UsageError(
            f"the working directory {order.directory} cannot be entered there ({error.strerror}); "
            "make it, or start from one that all hosts have."
        ) from None
    os.environ.update(order.environment)
    # As the interpreter would have done at its start: `_version` looks for packages there.
    path = order.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(entry).absolute()) for entry in path if entry]
    overrides: Overrides = {"hosts": None, "hostfile": None, "nnodes": str(order.nnodes), "node_rank": order.node}
    if order.slots is not None:
        overrides["nproc_per_node"] = str(order.slots)
    sys.argv[:] = [*(["python", "-m", "phalanx.launch"] if order.is_launch else ["phalanx", "run"]), *order.argv]
    spec, _ = parse(order.argv, os.environ, overrides, is_launch=order.is_launch)
    spec = messages.replace(spec, node_name=order.name)
    preflight.check(spec)
    return spec


def _hello(order: wire_protocol.Order, spec: LaunchSpec) -> wire_protocol.Hello:
    """Returns the answer to the order: what this machine has."""
    connection = os.environ.get("SSH_CONNECTION", "").split() if order.by_ssh else []
    client, server = (connection[0], connection[2]) if len(connection) == 4 else (None, None)
    return wire_protocol.Hello(
        python=".".join(map(str, sys.version_info[:2])),
        torch=_version("torch"),
        phalanx=_version("phalanx"),
        nproc=spec.nproc_per_node,
        port=_free_port() if order.node == 0 else None,
        client=client,
        server=server,
        first=_address_of(order.resolve) if order.resolve else None,
    )


def _version(package: str) -> str:
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = None
    if not found:  # None also for an incomplete installation
        raise UsageError(f"{package} is not installed for {sys.executable} there; install it.")
    return found


def _free_port() -> int:
    """Returns a port that was free a moment ago: all nodes must know it before this node's agent can bind it."""
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def _address_of(name: str) -> str | None:
    try:
        return network.resolve(name, "the host")
    except UsageError:
        return None


def _send(message: wire_protocol.Hello | wire_protocol.Refused | wire_protocol.Ended, node: str) -> None:
    sys.stderr.flush()
    try:
        os.write(2, wire_protocol.marked(message, node))
    except OSError:
        sys.exit(1)  # the conductor is gone


class Lifeline:
    """The original standard input of this process. The ranks get an empty one in its place."""

    def __init__(self) -> None:
        self._fd = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._received = b""

    def next_message(self, shape: type[T]) -> T | None:
        """Returns the next message; None if the conductor or the connection is gone, or sends something else."""
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                if not line:
                    continue  # a heartbeat
                try:
                    return messages.decode(line, shape, "the connection to the host that has started this one")
                except ForeignData as error:
                    print(f"phalanx: {error}", file=sys.stderr, flush=True)
                    return None
            readable, _, _ = select.select([self._fd], [], [], wire_protocol.SILENCE)
            received = os.read(self._fd, 1 << 16) if readable else b""
            if not received:
                return None
            self._received += received

    def pass_signals(self) -> None:
        """Passes the conductor's signals on to this process, and SIGTERM at the end of the lifeline."""
        while (message := self.next_message(wire_protocol.PassSignal)) is not None:
            os.kill(os.getpid(), message.signal)
        os.kill(os.getpid(), signal.SIGTERM)
