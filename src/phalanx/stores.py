"""Hosting torch's TCPStore on a socket that is already open."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any


def serve(host: str, listener: socket.socket, timeout: float) -> Any:
    """A store behind ``listener``, which stays open: a later store can take its place."""
    from torch.distributed import TCPStore

    def new(**how: bool) -> Any:
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=os.dup(listener.fileno()),  # the store closes what it is given
            **how,
        )

    try:
        return new()
    except NotImplementedError:  # until torch 2.7 its newer server could not take over an open socket
        return new(use_libuv=False)
