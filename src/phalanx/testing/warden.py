"""The client of the process that holds all virtual nodes (namespaces.py): starts it, gives it orders, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from phalanx.errors import LaunchError, PhalanxError
from phalanx.testing import namespaces

_SECONDS_TO_ANSWER = 30.0  # it takes some milliseconds; a machine can be busy

SECONDS_TO_END = 10.0
"""Seconds until killed processes are gone. Longer only if a Ctrl-C has interrupted a start on a node and left a zombie
there that nobody reaps: then its pid namespace remains until we end, with nothing alive in it."""


def script(*arguments: object) -> list[str]:
    """The command line of namespaces.py."""
    # Without site-packages and the user's settings: it starts in a third of the time, and nothing can break it.
    return [sys.executable, "-I", "-S", namespaces.__file__, *(str(argument) for argument in arguments)]


class Warden:
    """The process that holds the nodes, each given by its name and its /etc/hosts."""

    def __init__(self, nodes: Sequence[tuple[str, str]]) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_SECONDS_TO_ANSWER)
        with theirs:
            self._gate = subprocess.Popen(
                script("hold", theirs.fileno(), os.getpid(), json.dumps(nodes)),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C on the terminal is for us to act on
            )
        try:
            message, fds = self._receive(len(nodes))
            if "error" in message:
                raise LaunchError(
                    f"virtual nodes could not be made: {message['error']}. In a container they take the capabilities "
                    "SYS_ADMIN and NET_ADMIN (docker run --privileged)."
                )
        except BaseException:
            self.end()
            self.wait()
            raise
        self.pids: list[int] = message["pids"]
        """The pids of the nodes' holders, as the warden's commands see them."""
        self.holders = fds
        """Their pidfds, which belong to the caller."""

    def order(self, node: int | None, tool: str, lines: Sequence[str]) -> None:
        """Has `ip` or `tc` do something in the network of a node, or (None) of the switch."""
        order = {"node": node, "command": [tool, "-batch", "-"], "text": "\n".join(lines) + "\n"}
        with self._lock:
            self._control.send(json.dumps(order).encode())
            done, _ = self._receive(0)
        if done["code"] != 0:
            where = "the switch" if node is None else f"node {node}"
            raise PhalanxError(
                f"{tool} failed on {where}: {' '.join(done['output'].split())}; "
                "the kernel may lack what it takes: veth, bridge, and for a bandwidth sch_tbf."
            )

    def _receive(self, fds: int) -> tuple[dict[str, Any], list[int]]:
        text, received, _, _ = socket.recv_fds(self._control, namespaces.LARGEST_MESSAGE, fds, socket.MSG_CMSG_CLOEXEC)
        if not text:
            raise LaunchError("the process that holds the virtual nodes has ended; make new ones.")
        return json.loads(text), received

    def end(self) -> None:
        """Begins to kill everything; `wait` returns when nothing is left."""
        if self._control.fileno() >= 0:
            with contextlib.suppress(OSError):  # it has ended already
                self._control.shutdown(socket.SHUT_RDWR)  # unlike close, in force even if a forked child has a copy
            self._control.close()

    def wait(self) -> None:
        try:
            self._gate.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._gate.kill()
            self._gate.wait()
