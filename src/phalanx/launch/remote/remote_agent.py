"""The other end of a way: checks that its machine has what the run needs, then runs the agent of this node.

Orders come through standard input, which stays open as the lifeline: when it ends, or the conductor gives no sign of
life any more, this node's ranks are ended.
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
from typing import Any, NoReturn, TypeVar

from phalanx import messages, secret
from phalanx.errors import ForeignData, PhalanxError, UsageError
from phalanx.launch.output import wire_protocol
from phalanx.launch.spec import network, preflight
from phalanx.launch.spec.launch_spec import LaunchSpec

T = TypeVar("T")


Parse = Callable[..., tuple[LaunchSpec, bool]]
Run = Callable[[LaunchSpec, Mapping[str, str]], int]


def main(parse: Parse, parse_launch: Parse, run: Run) -> NoReturn:
    """Runs the agent of this host and exits with its code.

    ``parse``, ``parse_launch``: the command lines of `phalanx run` and `python -m phalanx.launch`; ``run``: the agent.
    """
    lifeline = Lifeline()
    order = lifeline.next_message(wire_protocol.Order)
    if order is None:
        sys.exit(1)
    secret.keep(order.secret)
    try:
        spec = _prepare(order, parse_launch if order.is_launch else parse)
        _tell(_hello(order, spec), order.name)
    except PhalanxError as error:
        _tell(wire_protocol.Refused(str(error)), order.name)
        sys.exit(2)
    go = lifeline.next_message(wire_protocol.Go)
    if go is None:  # called off
        sys.exit(1)
    if go.master_addr is not None:
        spec = messages.replace(spec, master_addr=go.master_addr, master_port=go.master_port)
    threading.Thread(target=lifeline.obey, name="lifeline", daemon=True).start()
    sys.exit(_run(spec, order.name, run))


def _run(spec: LaunchSpec, node: str, run: Run) -> int:
    try:
        code = run(spec, os.environ)
    except PhalanxError as error:
        _tell(wire_protocol.Refused(str(error)), node)
        code = 2
    except KeyboardInterrupt:  # before the agent could take it as its own
        code = 128 + signal.SIGINT
    _tell(wire_protocol.Ended(code), node)
    return code


def _prepare(order: wire_protocol.Order, parse: Parse) -> LaunchSpec:
    """This process becomes one like the conductor's: its directory, its variables, its command line."""
    try:
        os.chdir(order.directory)
    except OSError as error:
        raise UsageError(
            f"the working directory {order.directory} cannot be entered there ({error.strerror}); "
            "make it, or start from one that all hosts have."
        ) from None
    os.environ.update(order.environment)
    # As the interpreter would have done, had it been started with it: what is installed there is looked for below.
    path = order.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(entry).absolute()) for entry in path if entry]
    overrides: dict[str, Any] = {
        "hosts": None,
        "hostfile": None,
        "nnodes": str(order.nnodes),
        "node_rank": order.node,
    }
    if order.slots is not None:
        overrides["nproc_per_node"] = str(order.slots)
    sys.argv[:] = [*(["python", "-m", "phalanx.launch"] if order.is_launch else ["phalanx", "run"]), *order.argv]
    spec, _ = parse(order.argv, os.environ, overrides)
    spec = messages.replace(spec, node_name=order.name)
    preflight.check(spec)
    return spec


def _hello(order: wire_protocol.Order, spec: LaunchSpec) -> wire_protocol.Hello:
    """What the conductor wants to know of this machine."""
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
    if not found:  # of half an installation it is None as well
        raise UsageError(f"{package} is not installed for {sys.executable} there; install it.")
    return found


def _free_port() -> int:
    """Free a moment ago. All nodes must know it before the agent of this one can bind it."""
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def _address_of(name: str) -> str | None:
    try:
        return network.resolve(name, "the host")
    except UsageError:
        return None


def _tell(message: wire_protocol.Hello | wire_protocol.Refused | wire_protocol.Ended, node: str) -> None:
    sys.stderr.flush()
    try:
        os.write(2, wire_protocol.marked(message, node))
    except OSError:
        sys.exit(1)  # nobody listens any more


class Lifeline:
    """Standard input as it was given to this process. The ranks get an empty one in its place."""

    def __init__(self) -> None:
        self._fd = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._received = b""

    def next_message(self, shape: type[T]) -> T | None:
        """None when the conductor, or the connection to it, is gone, or sends something else."""
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                if not line:
                    continue  # a sign of life
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

    def obey(self) -> None:
        """Passes signals on, as if they had been sent here; the end of the line is one, too."""
        while (message := self.next_message(wire_protocol.PassSignal)) is not None:
            os.kill(os.getpid(), message.signal)
        os.kill(os.getpid(), signal.SIGTERM)
