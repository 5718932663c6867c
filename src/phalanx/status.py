"""The hallway: a page of memory in which each rank says what it is doing, readable from outside, even after its death.

``rank-N.status`` in the run directory, mapped by the rank. Writing is a store into memory: no lock, no system call.
A reader may come in the middle of one, so every page carries a counter that is odd while it is being written.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"phx-stat"
_VERSION = 1
_LAYOUT = struct.Struct("<8sIIQQQQdI")
_COUNTER = struct.Struct("<I")
_COUNTER_AT = 12
_BYTES = 4096

PHASES = ("started", "data", "compute", "done")


@dataclass(frozen=True)
class Status:
    """What a rank was doing at its last heartbeat."""

    pid: int
    epoch: int
    step: int
    samples: int
    """Of this rank, in this epoch."""
    heartbeat: float
    """Seconds since the epoch."""
    phase: str


class StatusPage:
    """The writing side. It lasts as long as the process: there is nothing to close that the end does not close."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _BYTES)
            self._page = mmap.mmap(fd, _BYTES)
        finally:
            os.close(fd)
        self._counter = 0
        self._pid = os.getpid()
        self.beat(0, 0, 0, 0)

    def beat(self, phase: int, epoch: int, step: int, samples: int) -> None:
        """``phase`` is a place in PHASES."""
        self._counter = (self._counter + 2) & 0xFFFFFFFF
        _COUNTER.pack_into(self._page, _COUNTER_AT, self._counter | 1)
        _LAYOUT.pack_into(
            self._page, 0, _MAGIC, _VERSION, self._counter | 1, self._pid, epoch, step, samples, time.time(), phase
        )
        _COUNTER.pack_into(self._page, _COUNTER_AT, self._counter)


def status_path(run_directory: Path, rank: int) -> Path:
    return run_directory / f"rank-{rank}.status"


def read(path: Path) -> Status | None:
    """What stands in the page; None when there is none, or none of ours."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    for _ in range(100):
        if len(data) < _LAYOUT.size or data[:8] != _MAGIC:
            return None
        _, version, counter, pid, epoch, step, samples, heartbeat, phase = _LAYOUT.unpack_from(data)
        if version != _VERSION:
            return None
        if counter % 2 == 0:
            return Status(pid, epoch, step, samples, heartbeat, PHASES[phase])
        data = path.read_bytes()
    return None  # it died while writing
