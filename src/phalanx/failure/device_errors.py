"""Errors of accelerators and of NCCL, found in what a rank printed or raised.

NCCL's watchdog and CUDA's errors end a process from C++: there is no Python error, only text. A timeout of the watchdog
means that another rank has not come, so it is a consequence; an error of CUDA is a cause.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from phalanx.events import DeviceError

_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: \w+\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+),"
    r".*?Timeout\(ms\)=(?P<limit>\d+)\)"
)
_DUMP = re.compile(r"Received a dump signal due to a collective timeout from\s+(?:this local|(?P<rank>rank \d+))")
_FROM_CPP = re.compile(r"(?m)^(?=terminate called| *what\(\):|.*\[[EF][\d :.]*ProcessGroup\w+\.cpp:\d+\])")
"""Where torch begins to say why it ends a process. What a script has printed before, it may have handled."""
_DEVICE = re.compile(r"(?:Triton Error \[)?(?P<kind>CUDA|HIP|XPU|NPU|SIM)(?: error|\]): (?P<text>[^\n]+)")
_LATE = re.compile(
    r"assert|illegal|misaligned|launch fail|launch timed out|ECC|program counter|stack error|unknown error"
)
"""Errors of kernels. The others, such as a missing device, are errors of the call that reports them."""
_ASSERT = re.compile(r"(?P<file>[\w.]+\.(?:cu|cuh|hip)):(?P<line>\d+):.*?Assertion `(?P<check>.+?)` failed")
_LAST_ERROR = re.compile(r"Last error:[ \t]*\n(?:\[rank\d+\]: )?(?P<text>[^\n]*\S)")
_NCCL = re.compile(r"(?P<name>nccl[A-Z]\w+): (?P<text>[^\n]+)")
_WHAT = re.compile(r"\s*what\(\):\s+(?P<text>\S.*)")
_OWN_MESSAGE = re.compile(rf"{_DEVICE.pattern}|NCCL |\[(PG|Rank|\d)")
"""How the message of an exception begins that is about nothing else."""
_NOISE = re.compile(
    r"\s*frame #\d+: |.*Exception raised from .* \(most recent call first\):|<omitting python frames>"
    r"|.*destroy_process_group\(\) was not called|terminate called (after|recursively|without)|\s*$"
)
_OPS = {"ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "all_gather_into_tensor"}
_CONSEQUENCES = ("ncclRemoteError", "ncclInProgress")
_SYNCHRONOUS = {"CUDA": "CUDA_LAUNCH_BLOCKING=1", "HIP": "AMD_SERIALIZE_KERNEL=3", "NPU": "ASCEND_LAUNCH_BLOCKING=1"}
"""The variable that makes a kind of device report an error at the line of its cause."""


def is_noise(line: str) -> bool:
    """A line of a C++ stack, or one that follows from every abort: no room is to be given to it."""
    return _NOISE.match(line) is not None


def find(message: str | None, output: Sequence[str] = ()) -> DeviceError | None:
    """The error of a device that ended a rank, after its exception or, if C++ ended it, its last lines of output."""
    printed = "\n".join(output)
    if message is not None:
        return _find(message, printed) if _OWN_MESSAGE.match(message) else None
    for text in reversed(_FROM_CPP.split(printed)[1:]):
        if found := _find(text, printed):
            return found
    if dump := _DUMP.search(printed):
        return DeviceError(f"a collective timed out on {dump['rank'] or 'this rank'}", is_consequence=True)
    starts = [match.start() for pattern in (_TIMEOUT, _DEVICE, _NCCL) for match in pattern.finditer(printed)]
    return _find(printed[max(starts) :], printed) if starts else None


def _find(text: str, printed: str) -> DeviceError | None:
    if timeout := _TIMEOUT.search(text):
        op, number = _OPS.get(timeout["op"], timeout["op"].strip("_").lower()), int(timeout["number"])
        waited = int(timeout["limit"]) / 1000
        headline = f"{op} #{number} did not end within {waited:g} s on all ranks"
        return DeviceError(headline, True, "it is not known which rank has not come", (op, number), waited)
    if device := _DEVICE.search(text):
        failed = _ASSERT.search(printed) if "assert" in device["text"] else None
        check = f" ({failed['file']}:{failed['line']}: {failed['check']})" if failed else ""
        return DeviceError(f"{device[0].rstrip('. ')}{check}", advice=_advice(device["kind"], device["text"]))
    if kind := _NCCL.search(text):
        last = _LAST_ERROR.search(text)
        reason = last["text"] if last is not None and not is_noise(last["text"]) else kind["text"]
        return DeviceError(f"{kind['name']}: {reason.strip()}", is_consequence=kind["name"] in _CONSEQUENCES)
    what = _WHAT.match(text)
    return DeviceError(f"uncaught C++ exception: {what['text']}") if what is not None else None


def _advice(kind: str, text: str) -> str:
    name, _, value = _SYNCHRONOUS.get(kind, "").partition("=")
    if not _LATE.search(text) or os.environ.get(name):  # then it was noticed at once
        return ""
    how = f"; run again with {name}={value} to find it" if name else ""
    return f"errors of a device are noticed late: the line may be another one{how}"
