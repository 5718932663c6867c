"""What is known of a failed rank's GPU from outside: its state, its errors, its other processes, and NCCL's own log."""

from __future__ import annotations

import contextlib
import pwd
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from phalanx import messages, run_files
from phalanx.devices import kernel_log
from phalanx.devices.gpu_state import GpuState
from phalanx.devices.kernel_log import Xid
from phalanx.events import FLIGHT_TRACE, NCCL_LOG, Ending
from phalanx.source_lines import shorten_path
from phalanx.system import in_bytes, procfs

_OUT_OF_MEMORY = re.compile(r"\w+ out of memory\b")
_OTHER_PROCESS = re.compile(r"Process (\d+) has ([\d.]+ \w+) memory in use")
_NCCL_WARNING = re.compile(r"NCCL WARN (.*\S)")
_MOST_BYTES, _MOST_WARNINGS, _LONGEST_NAME = 1 << 16, 2, 40
_NOT_KNOWN = 1 << 60
"""Bytes above this are the driver's way to say that it does not know."""
_TRACED_BEFORE = 300.0
"""Seconds from torch's dump of its collectives to the end of the rank, at most. An older one is of another attempt."""


def recent_xids(started: float, states: Sequence[GpuState]) -> list[Xid]:
    """What NVIDIA's driver has logged since the attempt started, if there is one."""
    return kernel_log.xids(time.time() - started) if states or procfs.nvidia_driver() else []


def add(endings: Sequence[Ending], states: Sequence[GpuState], xids: Sequence[Xid], directory: Path) -> list[Ending]:
    """The same, with what is known of the GPU of each rank that has failed."""
    ranks = {ending.pid: ending.rank for ending in endings}
    return [
        messages.replace(one, evidence=tuple(_sentences(one, states, xids, ranks, directory))) if one.failed else one
        for one in endings
    ]


def _sentences(
    ending: Ending, states: Sequence[GpuState], xids: Sequence[Xid], ranks: Mapping[int, int], directory: Path
) -> Iterator[str]:
    gpu = next((state for state in states if ending.pid in dict(state.processes)), None)
    if gpu is not None:
        yield f"its GPU {gpu.index}, {gpu}"
    if ending.error is not None and _OUT_OF_MEMORY.match(ending.error.message):
        yield from _other_processes(ending.error.message, gpu, ending.pid, ranks)
    if gpu is not None and gpu.ecc_errors:
        yield f"GPU {gpu.index}: {gpu.ecc_errors} uncorrectable ECC errors since its driver was loaded (nvidia-smi -q)"
    by_device = ending.device_error is not None and not ending.device_error.is_consequence
    for xid in dict.fromkeys(messages.replace(xid, seconds_ago=0.0) for xid in xids):
        is_own = xid.pid == ending.pid or (gpu is not None and gpu.bus == xid.bus.lower())
        if is_own or (gpu is None and xid.pid is None and by_device):
            yield f"the driver has logged Xid {xid.number} for the GPU at {xid.bus}: {xid.meaning}"
    yield from _written_by_nccl(ending, directory)


def _other_processes(message: str, gpu: GpuState | None, own: int, ranks: Mapping[int, int]) -> Iterator[str]:
    """Who else has memory of the GPU. torch's message names the pids and sizes of that moment, if it is new enough."""
    sizes = {int(pid): size for pid, size in _OTHER_PROCESS.findall(message)}
    are_own_pids = gpu is not None or "this process has" in message  # in a container the driver has those of the host
    if not sizes and gpu is not None:
        sizes = {pid: in_bytes(size) if size < _NOT_KNOWN else "" for pid, size in gpu.processes if pid != own}
    named = [f"{_name(pid, ranks) if are_own_pids else f'pid {pid} of the host'} {size}" for pid, size in sizes.items()]
    if named:
        yield f"also in its memory: {', '.join(map(str.strip, named))}"


def _name(pid: int, ranks: Mapping[int, int]) -> str:
    if pid in ranks:
        return f"rank {ranks[pid]} of this run"
    user = owner = procfs.owner(pid)
    if owner is None:
        return f"pid {pid}"
    with contextlib.suppress(KeyError):  # a user id without a name
        user = pwd.getpwuid(owner).pw_name
    command, *_ = procfs.command(pid).split() or ["unknown"]
    name = "".join(filter(str.isprintable, Path(command).name))[:_LONGEST_NAME]  # its user has chosen it
    return f"pid {pid} ({name} of {user})"


def _written_by_nccl(ending: Ending, directory: Path) -> Iterator[str]:
    """What NCCL has logged last, and where torch has written the last collectives. That is a pickle: it is not read."""
    path = directory / NCCL_LOG.format(ending.pid)
    with contextlib.suppress(OSError):
        text = run_files.read(path, max(0, path.stat().st_size - _MOST_BYTES), _MOST_BYTES).decode(errors="replace")
        lines = dict.fromkeys("".join(filter(str.isprintable, line)) for line in _NCCL_WARNING.findall(text))
        headline = ending.device_error.headline if ending.device_error is not None else ""
        if warnings := [line for line in lines if line not in headline]:
            yield f"NCCL has warned: {'; '.join(warnings[-_MOST_WARNINGS:])}"
    with contextlib.suppress(OSError):
        if (directory / f"{FLIGHT_TRACE}{ending.rank}").stat().st_mtime > ending.time - _TRACED_BEFORE:
            command = f"torchfrtrace -p {FLIGHT_TRACE} {shorten_path(str(directory))}"
            yield f"torch has written the last collectives of each rank: {command}"
