"""How a failure on one node becomes known on the others: the first one is written to the store, and stays."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from phalanx import messages
from phalanx.messages import Name, Text
from phalanx.shm.node import failures
from phalanx.store import join

_KEY = "failure"
_GLANCE = 0.2
"""Seconds for an answer of the store when somebody looks in passing."""
_PATIENCE = 3.0
"""The same when a failure is to be told or explained."""


class FailureStore:
    """The group's first failure, in the group's store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._known: Exception | None = None
        self._asking: threading.Thread | None = None

    def raise_with(self, error: Exception) -> Exception:
        """Makes it known. Returns what is the cause for everybody: this one, unless another one was first."""
        if self._known is None:
            seconds = _GLANCE if self.is_silent else _PATIENCE
            found = self._ask(lambda: self._store.compare_set(_KEY, "", encode(error).decode()), seconds)
            self._known = error if found is None else decode(found)
        return self._known

    def cause(self, seconds: float = 0.0) -> Exception | None:
        """What somebody has made known, or makes known within that time."""
        if self._known is None:
            found = self._ask(lambda: self._read(seconds), seconds + _PATIENCE if seconds else _GLANCE)
            self._known = None if found is None else decode(found)
        return self._known

    @property
    def is_silent(self) -> bool:
        """The store owes an answer: its host may be lost, or the way to it."""
        return self._asking is not None and self._asking.is_alive()

    def _read(self, seconds: float) -> bytes | None:
        there = join.wait_for(self._store, _KEY, seconds) if seconds else self._store.check([_KEY])
        return self._store.get(_KEY) if there else None

    def _ask(self, question: Callable[[], bytes | None], seconds: float) -> bytes | None:
        """The store's answer within that time, or None.

        In a thread, because torch waits without end for a host that is gone without a word. As long as it does, nothing
        more is asked: the store takes one question at a time.
        """
        if self._asking is not None:
            self._asking.join(seconds)
            if self._asking.is_alive():
                return None
        answers: list[bytes | None] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the process that served the store may be the one that is lost
                answers.append(question())

        self._asking = threading.Thread(target=ask, name="phalanx-alarm", daemon=True)
        self._asking.start()
        self._asking.join(seconds)
        return answers[0] if answers else None


def encode(error: Exception) -> bytes:
    return messages.encode((type(error).__name__, str(error)))


def decode(data: bytes | bytearray) -> Exception:
    return failures.by_name(*messages.decode(data, tuple[Name, Text], "the failure that another rank reports"))
