"""Explains the signal that ended a rank, with the state of memory at that moment, and what helps."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from phalanx.events import Ending, OutOfMemory, SharedMemory
from phalanx.system import in_bytes

_MEANINGS = {
    "SIGKILL": "killed from outside: by the kernel when memory runs out, or by somebody's kill -9",
    "SIGSEGV": "native code touched memory that is not its own",
    "SIGBUS": "memory could not be provided, most often because /dev/shm is full",
    "SIGABRT": "native code gave up: a failed check or an uncaught C++ exception",
    "SIGFPE": "native code divided by zero or overflowed",
    "SIGILL": "native code used an instruction this processor does not have",
    "SIGTERM": "another process asked it to end",
    "SIGINT": "interrupted",
    "SIGHUP": "its terminal was closed",
    "SIGPIPE": "it wrote to a pipe that nobody reads",
    "SIGXCPU": "its limit of processor time was reached",
}
_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)\.")
_NEARLY_FULL = 0.95
_MUCH = 1 << 30


def meaning(ending: Ending) -> str:
    """Returns the meaning of the signal that ended a rank."""
    assert ending.signal is not None
    name = signal_name(ending.signal)
    if ending.out_of_memory is not None:
        return f"{name}, {_killed_for_memory(ending)}"
    sizes = gloo_mismatch(ending)
    if sizes is not None:
        received = f"gloo has received {sizes[0]} bytes where {sizes[1]} were expected"
        return f"{name}, {received}: the ranks have called different collectives, or one with different sizes"
    if name == "SIGBUS" and ending.shared_memory is not None:
        return f"{name}, {_shared_memory(ending.shared_memory)}"
    return f"{name}, {_MEANINGS[name]}" if name in _MEANINGS else name


def gloo_mismatch(ending: Ending) -> tuple[int, int] | None:
    """Returns the bytes received and expected, if gloo has ended the process because they differ."""
    if ending.signal != signal.SIGABRT:
        return None
    found = next(filter(None, map(_GLOO_SIZES.search, ending.tail)), None)
    return (int(found[1]), int(found[2])) if found else None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def explanation(ending: Ending) -> list[str]:
    """Returns the sentences below the headline: what else is known, and what helps."""
    error = ending.error
    told = [error.note] if error is not None and error.note else []
    if ending.device_error is not None and ending.device_error.advice:
        told.append(ending.device_error.advice)
    if ending.out_of_memory is not None:
        if error is not None:
            told.append(f"its process {ending.out_of_memory.pid} was {_killed_for_memory(ending)}")
        told.append(_more_memory(ending.out_of_memory))
    elif ending.shared_memory is not None:
        if error is not None:
            told.append(_shared_memory(ending.shared_memory, is_certain="No space left" in error.message))
        if not _has_room(ending.shared_memory):
            told.append(
                "what DataLoader workers send is kept there: enlarge it (docker run --shm-size 8g, or "
                "mount -o remount,size=8g /dev/shm), or use fewer workers"
            )
    return told


def memory_ran_out(kills: int, limit: int, group: str, used: Mapping[int, int]) -> list[str]:
    """Explains a launcher that has lost its ranks. ``used``: bytes of the ranks that are known to have been killed."""
    who = ", ".join(f"rank {rank}, which used {in_bytes(memory)}," for rank, memory in sorted(used.items()))
    who = who or f"{kills} process{'es' * (kills > 1)} of this run"
    return [
        f"the kernel has killed {who} for memory: the limit is {in_bytes(limit)}",
        _more_memory(OutOfMemory(0, None, limit, group)),
    ]


def _killed_for_memory(ending: Ending) -> str:
    killed = ending.out_of_memory
    assert killed is not None
    who = f"rank {ending.rank}" if killed.pid == ending.pid else "it"
    used = f", {who} used {in_bytes(killed.used)}" if killed.used else ""
    return f"killed by the kernel for memory: the limit is {in_bytes(killed.limit)}{used}"


def _more_memory(killed: OutOfMemory) -> str:
    less = "fewer ranks, fewer DataLoader workers or smaller batches"
    if not killed.group:
        return f"that is the memory of this machine; use {less}, or another machine"
    how = "docker run --memory, sbatch --mem, systemd-run -p MemoryMax="
    return f"the limit is that of the control group {killed.group}; raise it ({how}), or use {less}"


def _shared_memory(found: SharedMemory, *, is_certain: bool = False) -> str:
    """Describes /dev/shm. ``is_certain``: the system has reported that there was no room, though there is again."""
    used, total = in_bytes(found.used), in_bytes(found.total)
    if found.used >= _NEARLY_FULL * found.total:
        return f"/dev/shm is full ({used} of {total})"
    if is_certain:
        return f"/dev/shm is too small: its {total} did not suffice"
    if _has_room(found):
        return f"a mapped file was cut off, or memory is damaged; /dev/shm has room ({used} of {total} in use)"
    return f"/dev/shm had no room ({used} of {total} in use around that time), or a mapped file was cut off"


def _has_room(found: SharedMemory) -> bool:
    """True if there is so much room that it can hardly have been full a moment before."""
    return found.total - found.used > _MUCH
