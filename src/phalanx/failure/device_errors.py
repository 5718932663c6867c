"""Errors of accelerators and of NCCL, found in what a rank printed or raised.

NCCL's watchdog and CUDA's errors end a process from C++: there is no Python error, only text. A timeout of the watchdog
means that another rank has not come, so it is a consequence; an error of CUDA is a cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: \w+\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+),"
    r".*?Timeout\(ms\)=(?P<limit>\d+)\)"
)
_DEVICE = re.compile(r"(?:CUDA|HIP|XPU|NPU|SIM) error: (?P<text>[^\n]+)")
_ASSERT = re.compile(r"(?P<file>[\w.]+\.(?:cu|cuh|hip)):(?P<line>\d+):.*?Assertion `(?P<check>.+?)` failed")
_LAST_ERROR = re.compile(r"Last error:\s*\n(?P<text>[^\n]*\S)")
_NCCL = re.compile(r"(?P<name>nccl[A-Z]\w+): ")
_WHAT = re.compile(r"^\s*what\(\):\s+(?P<text>\S.*)")
_NOISE = re.compile(
    r"\s*frame #\d+: |.*Exception raised from .* \(most recent call first\):|<omitting python frames>"
    r"|.*destroy_process_group\(\) was not called|terminate called (after|recursively)|\s*$"
)
_OPS = {"ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "all_gather_into_tensor"}
_CONSEQUENCES = ("ncclRemoteError", "ncclInProgress")
LATE = (
    "errors of a device are noticed late: the line may be another one; run again with CUDA_LAUNCH_BLOCKING=1 to find it"
)


class DeviceError(NamedTuple):
    """One error of a device or of NCCL."""

    headline: str
    is_consequence: bool
    """Another rank is the cause."""
    is_late: bool = False
    """It may have happened at an earlier line than where it was noticed."""


def is_noise(line: str) -> bool:
    """A line of a C++ stack, or one that follows from every abort: no room is to be given to it."""
    return _NOISE.match(line) is not None


def in_output(lines: Iterable[str]) -> DeviceError | None:
    """The error that ended a process from C++, in its last lines; None if they show none."""
    text = "\n".join(lines)
    device = _DEVICE.search(text)
    if device is not None:
        failed = _ASSERT.search(text)
        check = f" ({failed['file']}:{failed['line']}: {failed['check']})" if failed else ""
        return DeviceError(f"{device[0].rstrip('. ')}{check}", is_consequence=False, is_late=True)
    timeout = _TIMEOUT.search(text)
    if timeout is not None:
        op = _OPS.get(timeout["op"], timeout["op"].strip("_").lower())
        waited = int(timeout["limit"]) / 1000
        return DeviceError(
            f"{op} #{timeout['number']} did not end within {waited:g} s on all ranks", is_consequence=True
        )
    return in_message(text) or _uncaught(text)


def in_message(message: str) -> DeviceError | None:
    """NCCL's error in the message of an exception; None if it is of another kind."""
    kind = _NCCL.search(message)
    if kind is None:
        return None
    last = _LAST_ERROR.search(message)
    is_consequence = kind["name"] in _CONSEQUENCES
    return DeviceError(f"{kind['name']}: {last['text'].strip()}" if last else kind["name"], is_consequence)


def _uncaught(text: str) -> DeviceError | None:
    found = next(filter(None, map(_WHAT.match, text.splitlines())), None)
    return DeviceError(f"uncaught C++ exception: {found['text']}", is_consequence=False) if found else None
