"""Errors of NVIDIA's driver in the kernel's log: Xid numbers, with what they mean."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from phalanx.messages import Record

_PATH = Path("/dev/kmsg")
_MOST_RECORDS = 20_000
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<number>\d+)(?:, pid='?(?P<pid>\d+)'?)?(?P<text>.*)")
_MEANINGS = {
    13: "a kernel of the program accessed memory that it may not",
    31: "a kernel of the program used an invalid address",
    43: "the program's own kernels failed, and the GPU stopped them",
    45: "the driver cleaned up after an earlier error",
    48: "a memory error that ECC cannot correct: the GPU needs a reset, or to be replaced",
    61: "an internal error of the GPU",
    62: "an internal error of the GPU",
    63: "a memory row is to be remapped: the GPU needs a reset",
    64: "a memory row could not be remapped: the GPU has to be replaced",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus: the machine needs a restart, or its hardware a check",
    94: "a memory error that was contained: start the program again",
    95: "a memory error that was not contained: the GPU needs a reset",
    119: "the GPU's own processor does not answer: the GPU needs a reset",
    120: "the GPU's own processor failed: the GPU needs a reset",
}


class Xid(Record, frozen=True):
    """One error that the driver has logged."""

    number: int
    bus: str
    pid: int | None
    seconds_ago: float

    @property
    def meaning(self) -> str:
        return _MEANINGS.get(self.number, "see NVIDIA's list of Xid errors")


def xids(since: float, path: Path = _PATH, now: float | None = None) -> list[Xid]:
    """Those of the last ``since`` seconds; an empty list where the log may not be read.

    ``now``: seconds since the start of the machine, which is what the log counts by.
    """
    moment = time.clock_gettime(time.CLOCK_MONOTONIC) if now is None else now
    found = []
    for line in _lines(path):
        head, _, text = line.partition(";")
        match = _XID.search(text)
        fields = head.split(",")
        if match is None or len(fields) < 3 or not fields[2].isdigit():
            continue
        age = moment - int(fields[2]) / 1e6
        if age <= since:
            pid = int(match["pid"]) if match["pid"] else None
            found.append(Xid(int(match["number"]), match["bus"], pid, max(0.0, age)))
    return found


def _lines(path: Path) -> list[str]:
    """The records of the log. Each read of the real one returns one record, and fails when there is no more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    lines: list[str] = []
    try:
        while len(lines) < _MOST_RECORDS:
            try:
                data = os.read(fd, 1 << 13)
            except BrokenPipeError:  # the oldest record was overwritten meanwhile
                continue
            if not data:
                break
            lines += data.decode(errors="replace").splitlines()
    except OSError:  # EAGAIN: that was the last one
        pass
    finally:
        os.close(fd)
    return lines
