"""How a failure on one node becomes known on the others: the first one is written to the store, and stays."""

from __future__ import annotations

import json
from typing import Any

from phalanx import join
from phalanx.shm import failures

_KEY = "failure"


class Alarm:
    """The group's first failure, in the group's store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._known: Exception | None = None

    def raise_with(self, error: Exception) -> Exception:
        """Makes it known. Returns what is the cause for everybody: this one, unless another one was first."""
        if self._known is None:
            try:
                self._known = decode(self._store.compare_set(_KEY, "", encode(error).decode()))
            except RuntimeError:  # the process that served the store may be the one that is lost
                self._known = error
        return self._known

    def cause(self, seconds: float = 0.0) -> Exception | None:
        """What somebody has made known, or makes known within that time."""
        if self._known is not None:
            return self._known
        try:
            there = join.wait_for(self._store, _KEY, seconds) if seconds else self._store.check([_KEY])
            self._known = decode(self._store.get(_KEY)) if there else None
        except RuntimeError:
            return None
        return self._known


def encode(error: Exception) -> bytes:
    return json.dumps([type(error).__name__, str(error)]).encode()


def decode(data: bytes | bytearray) -> Exception:
    return failures.by_name(*json.loads(data))
