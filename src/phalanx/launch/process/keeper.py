"""The keeper: hosts the run's store, and ends every process that outlives the agent.

It serves a listening socket that was bound before anything started, so the port is never free for another program.
Each attempt gets a new store on the same socket: a restarted worker cannot read a key of the attempt before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from phalanx.errors import ForeignData
from phalanx.fd_channel import Channel
from phalanx.launch.process import process_tree
from phalanx.launch.process.zygote_messages import FreshStore
from phalanx.store import tcp_store

_ZYGOTE_SECONDS = 15.0
"""Longer than the zygote waits for a process that cannot be killed."""


def serve(channel: Channel, listener: socket.socket | None, token: str, with_nodes: bool) -> None:
    """Runs until the agent closes the channel or dies."""
    zygote = os.getppid()
    if with_nodes:
        from phalanx.launch.multinode.keeper_session import KeeperSession

        KeeperSession(channel, listener).serve()
    else:
        assert listener is not None
        with contextlib.suppress(ForeignData):  # the sender is not our agent
            _serve_workers(channel, listener)
    # The zygote ends everything, this process last. If both did it at once, one would kill the other before that has
    # removed the shared memory of the processes that it has killed.
    if not process_tree.is_gone(zygote, _ZYGOTE_SECONDS):
        os.kill(zygote, signal.SIGKILL)
    process_tree.end_all(lambda: process_tree.processes_of_run(token))


def _serve_workers(channel: Channel, listener: socket.socket) -> None:
    store = None
    while channel.receive(FreshStore) is not None:
        del store  # its thread ends and its connections close before the next one starts
        store = tcp_store.serve(listener.getsockname()[0], listener, timeout=60.0)
        channel.send(FreshStore())
