"""The first failure of a group, in its store: any rank can raise it, and all ranks see the same one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.messages import Name, Record, Text
from phalanx.store.primitives import propose, read, wait_for

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "failure"
_LOOK_TIMEOUT = 0.2
"""Seconds for an answer of the store to a rank that only looks."""
_ANSWER_TIMEOUT = 3.0
"""Seconds for an answer when a failure is raised or explained."""


class Failure(Record, frozen=True):
    """An exception, as another process can read it."""

    kind: Name
    """The name of its class."""
    text: Text

    @staticmethod
    def of(error: Exception) -> Failure:
        return Failure(type(error).__name__, str(error))


class FailureFlag:
    """The group's first failure, once this rank has seen or raised one."""

    def __init__(self, store: Store, to_exception: Callable[[str, str], Exception]) -> None:
        """``to_exception`` makes one of the name of its class and its text."""
        self._store, self._to_exception = store, to_exception
        self._known: Exception | None = None
        self._request: threading.Thread | None = None

    def raise_with(self, error: Exception) -> Exception:
        """Raises the flag for all ranks. Returns their common cause: this error, unless another one was first."""
        if self._known is None:
            seconds = _LOOK_TIMEOUT if self.is_silent else _ANSWER_TIMEOUT
            first = self._ask(lambda: propose(self._store, _KEY, Failure.of(error)), seconds)
            self._known = error if first is None else self._to_exception(first.kind, first.text)
        return self._known

    def cause(self, seconds: float = 0.0) -> Exception | None:
        """Returns the failure that a rank has raised, or raises within ``seconds``."""
        if self._known is None:
            found = self._ask(lambda: self._read(seconds), seconds + _ANSWER_TIMEOUT if seconds else _LOOK_TIMEOUT)
            self._known = None if found is None else self._to_exception(found.kind, found.text)
        return self._known

    @property
    def is_silent(self) -> bool:
        """The store has not answered yet: its host or the connection may be lost."""
        return self._request is not None and self._request.is_alive()

    def _read(self, seconds: float) -> Failure | None:
        return read(self._store, _KEY, Failure) if wait_for(self._store, _KEY, seconds) else None

    def _ask(self, request: Callable[[], Failure | None], seconds: float) -> Failure | None:
        """Returns the store's answer; None if it does not come in time.

        In a thread, because torch waits without end for a host that vanished. Until that has ended there is no other
        request: a connection to the store takes one at a time.
        """
        if self._request is not None:
            self._request.join(seconds)
            if self._request.is_alive():
                return None
        answers: list[Failure | None] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the store is lost, or holds a value that is not ours
                answers.append(request())

        self._request = threading.Thread(target=ask, name="phalanx-failure-flag", daemon=True)
        self._request.start()
        self._request.join(seconds)
        return answers[0] if answers else None
