"""All ranks of a run vote on what every one of them must be able to do. One vote against is enough.

A node that decided for itself would wait for ever for those that decided otherwise.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from phalanx import env
from phalanx.errors import JoinError
from phalanx.store import tcp_store
from phalanx.store.primitives import await_verdict, propose, read, write

if TYPE_CHECKING:
    from torch.distributed import Store

_REACH_TIMEOUT = 60.0


def objection(topic: str, against: str | None, timeout: float) -> str | None:
    """Returns the first reason that a rank of this run gave against ``topic``, with its name; None if all are for it.

    Every rank calls it once in an attempt, with its own reason or None. A rank that is against does not wait.
    """
    from torch.distributed import PrefixStore

    rank = env.require_integer(os.environ, "RANK", beside="PHALANX_STORE")
    size = env.require_integer(os.environ, "WORLD_SIZE", beside="PHALANX_STORE")
    host, _, port = os.environ["PHALANX_STORE"].rpartition(":")
    shared = tcp_store.connect(host, int(port), _REACH_TIMEOUT)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"phalanx/vote/{attempt}/{topic}", shared)
    if against is not None:
        against = f"rank {rank} (host {socket.gethostname()}): {against}"
    return vote(store, rank, size, against, timeout)


def vote(store: Store, rank: int, size: int, against: str | None, timeout: float) -> str | None:
    """Votes in a part of the store where nothing else is; an empty verdict is for it."""
    if against is not None:
        return propose(store, "verdict", against) or None
    if store.add(f"for/{rank}", 1) == 1 and store.add("votes for", 1) == size:
        write(store, "verdict", "")  # nobody is left who could be against
    missing = await_verdict(store, "for", size, timeout, f"rank {rank}", "ranks to join")
    if missing:
        raise JoinError(f"rank {rank} {missing}; they have not called init, or died.")
    return read(store, "verdict", str) or None
