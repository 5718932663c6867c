"""A vote of all ranks of a run, on what every one of them must be able to do. One against is enough.

A node that decides for itself would wait for ever for those that decided otherwise.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

from phalanx import env, messages
from phalanx.errors import JoinError
from phalanx.store import join

_REACH_TIMEOUT = 60.0
_SLICE = 2.0
"""A wait in the store cannot be interrupted, so it is done in pieces of this length."""
_FIRST_WORD = 10.0


def has_store() -> bool:
    """Whether `phalanx run` has a store for this process to vote in."""
    return bool(os.environ.get("PHALANX_STORE"))


def objection(topic: str, against: str | None, timeout: float) -> str | None:
    """The first reason that a rank of this run gave against ``topic``, with its name; None when all are for it.

    Every rank calls it once in an attempt, with its own reason or None. Who is against need not wait for the others.
    """
    from torch.distributed import PrefixStore

    rank = env.require_integer(os.environ, "RANK", beside="PHALANX_STORE")
    size = env.require_integer(os.environ, "WORLD_SIZE", beside="PHALANX_STORE")
    host, _, port = os.environ["PHALANX_STORE"].rpartition(":")
    shared, _ = join.open_store(join.url_of(host, int(port)), rank, size, up=True, timeout=_REACH_TIMEOUT)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"phalanx/vote/{attempt}/{topic}", shared)
    if against is not None:
        against = f"rank {rank} (host {socket.gethostname()}): {against}"
    return vote(store, rank, size, against, timeout)


def vote(store: Any, rank: int, size: int, against: str | None, timeout: float) -> str | None:
    """The same, in a store where nothing else is."""
    if against is not None:
        return _verdict(store.compare_set("verdict", "", messages.encode(against)))
    if store.add(f"for/{rank}", 1) == 1 and store.add("votes for", 1) == size:
        store.set("verdict", messages.encode(None))  # nobody is left who could be against
    _await_verdict(store, rank, size, timeout)
    return _verdict(store.get("verdict"))


def _verdict(data: bytes) -> str | None:
    return messages.decode(data, str | None, "the store of the run")


def _await_verdict(store: Any, rank: int, size: int, timeout: float) -> None:
    started = time.monotonic()
    told = started + _FIRST_WORD
    while not join.wait_for(store, "verdict", _SLICE):
        now = time.monotonic()
        if now < min(told, started + timeout):
            continue
        told = now + _FIRST_WORD
        missing = [other for other in range(size) if not store.check([f"for/{other}"])]
        names = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
        text = f"rank {rank} waited {now - started:.0f} s for {len(missing)} of {size} ranks to join: {names}"
        if now >= started + timeout:
            raise JoinError(f"{text}; they have not called init, or died.")
        print(f"phalanx: {text}", file=sys.stderr, flush=True)
