"""The other end of a way: checks that its machine has what the run needs, then runs the agent of this node.

Orders come through standard input, which stays open as the lifeline: when it ends, or the conductor gives no sign of
life any more, this node's ranks are ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

from phalanx import secret
from phalanx.errors import PhalanxError, UsageError
from phalanx.launch import parse
from phalanx.launch.output import wire_protocol
from phalanx.launch.spec import network, preflight
from phalanx.launch.spec.launch_spec import LaunchSpec


def main() -> None:
    """Entry of the process that a way starts; exits with the agent's code."""
    lifeline = Lifeline()
    order = lifeline.next_message()
    if order is None:
        sys.exit(1)
    secret.keep(order["secret"])
    try:
        spec = _prepare(order)
        _tell(hello=_hello(order, spec))
    except PhalanxError as error:
        _tell(refused=str(error))
        sys.exit(2)
    message = lifeline.next_message()
    if message is None or "go" not in message:  # called off
        sys.exit(1)
    spec = dataclasses.replace(spec, **message["go"])
    threading.Thread(target=lifeline.obey, name="lifeline", daemon=True).start()
    sys.exit(_run(spec))


def _run(spec: LaunchSpec) -> int:
    from phalanx.launch.start import run

    try:
        code = run(spec, os.environ)
    except PhalanxError as error:
        _tell(refused=str(error))
        code = 2
    except KeyboardInterrupt:  # before the agent could take it as its own
        code = 128 + signal.SIGINT
    _tell(ended=code)
    return code


def _prepare(order: dict[str, Any]) -> LaunchSpec:
    """This process becomes one like the conductor's: its directory, its variables, its command line."""
    try:
        os.chdir(order["directory"])
    except OSError as error:
        raise UsageError(
            f"the working directory {order['directory']} cannot be entered there ({error.strerror}); "
            "make it, or start from one that all hosts have."
        ) from None
    os.environ.update(order["environment"])
    # As the interpreter would have done, had it been started with it: what is installed there is looked for below.
    path = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(entry).absolute()) for entry in path if entry]
    overrides: dict[str, Any] = {
        "hosts": None,
        "hostfile": None,
        "nnodes": str(order["nnodes"]),
        "node_rank": order["node"],
    }
    if order["slots"] is not None:
        overrides["nproc_per_node"] = str(order["slots"])
    sys.argv[:] = [*(["python", "-m", "phalanx.launch"] if order["launch"] else ["phalanx", "run"]), *order["argv"]]
    read = parse.parse_launch if order["launch"] else parse.parse
    spec, _ = read(order["argv"], os.environ, overrides)
    spec = dataclasses.replace(spec, node_name=order["name"])
    preflight.check(spec)
    return spec


def _hello(order: dict[str, Any], spec: LaunchSpec) -> dict[str, Any]:
    """What the conductor wants to know of this machine."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "phalanx"):
        versions[package] = _version(package)
        if versions[package] is None:
            raise UsageError(f"{package} is not installed for {sys.executable} there; install it.")
    connection = os.environ.get("SSH_CONNECTION", "").split() if order["kind"] == "ssh" else []
    client, server = (connection[0], connection[2]) if len(connection) == 4 else (None, None)
    return {
        **versions,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "nproc": spec.nproc_per_node,
        "port": _free_port() if order["node"] == 0 else None,
        "client": client,
        "server": server,
        "first": _address_of(order["resolve"]) if order["resolve"] else None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package) or None  # of half an installation it is None as well
    except metadata.PackageNotFoundError:
        return None


def _free_port() -> int:
    """Free a moment ago. All nodes must know it before the agent of this one can bind it."""
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def _address_of(name: str) -> str | None:
    try:
        return network.resolve(name, "the host")
    except UsageError:
        return None


def _tell(**message: Any) -> None:
    sys.stderr.flush()
    try:
        os.write(2, wire_protocol.marked(**message))
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

    def next_message(self) -> dict[str, Any] | None:
        """None when the conductor, or the connection to it, is gone."""
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                if line:
                    return json.loads(line)
                continue  # a sign of life
            readable, _, _ = select.select([self._fd], [], [], wire_protocol.SILENCE)
            received = os.read(self._fd, 1 << 16) if readable else b""
            if not received:
                return None
            self._received += received

    def obey(self) -> None:
        """Passes signals on, as if they had been sent here; the end of the line is one, too."""
        while (message := self.next_message()) is not None:
            os.kill(os.getpid(), message["signal"])
        os.kill(os.getpid(), signal.SIGTERM)
