"""The keeper: hosts the run's store, and sees to it that nothing outlives the agent.

It serves a listening socket that was bound before anything started, so the port is never free for somebody else.
Each attempt gets a new store on the same socket: a restarted worker cannot meet a key of the attempt before.
"""

from __future__ import annotations

import socket
from typing import Any

from phalanx import stores
from phalanx.launch import orphans
from phalanx.launch.channel import Channel


def serve(channel: Channel, listener: socket.socket, token: str) -> None:
    """Runs until the agent says goodbye or dies."""
    store: Any = None
    while (received := channel.receive()) is not None:
        message, _ = received
        if message["op"] == "fresh":
            del store  # its thread ends and its connections close before the next one starts
            store = stores.serve(listener.getsockname()[0], listener, timeout=60.0)
            channel.send({"event": "fresh"})
    orphans.end_all(lambda: orphans.bearers(token))
