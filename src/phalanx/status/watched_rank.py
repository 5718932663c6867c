"""A rank's process as a watchdog sees it, whoever has started it."""

from __future__ import annotations

from typing import Protocol

from phalanx.events import ErrorRecord, ThreadDeath


class ProcessExit(Protocol):
    """How a process ended, as the kernel reports it."""

    @property
    def pid(self) -> int: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def signal(self) -> int | None: ...
    @property
    def memory(self) -> int: ...


class WatchedRank(Protocol):
    """A rank of the running attempt."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def exited(self) -> ProcessExit | None: ...
    @property
    def error(self) -> ErrorRecord | None: ...
    @property
    def thread_death(self) -> ThreadDeath | None: ...
    @property
    def asked_with(self) -> int | None: ...
