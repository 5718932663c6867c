"""What a machine has for its ranks: cores, memory, open files, processes, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx import env
from phalanx.diagnose.doctor.finding import Facts, Finding, container_setting, counted, judged
from phalanx.system import procfs
from phalanx.system.cgroups import Allowance
from phalanx.system.sizes import in_bytes

_MEMORY_OF_TORCH = 512 << 20
"""What a process that has imported torch and does something may well use."""
_SMALL_SHM = 1 << 30
_TINY_SHM = 64_000_000
_FEW_FILES = 1024
_SMALL_DISK = 1 << 30
_TINY_DISK = 100 << 20


@dataclass(frozen=True)
class Memory:
    """In bytes."""

    total: int
    available: int
    limit: int | None
    """By the container."""
    used_of_limit: int
    swap: int

    @property
    def left(self) -> int:
        return self.available if self.limit is None else min(self.available, self.limit - self.used_of_limit)


@dataclass(frozen=True)
class Space:
    """A file system, in bytes."""

    path: str
    total: int
    free: int
    is_writable: bool = True


@dataclass(frozen=True)
class Limits:
    """None means that there is none."""

    files_soft: int | None
    files_hard: int | None
    processes: int | None
    processes_used: int
    processes_by_container: bool
    """Whose limit ``processes`` is: the container's, or the user's."""


# ---- reading


def read_memory(allowed: Allowance) -> Memory:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit = allowed.memory if allowed.memory is not None and allowed.memory < memory.total else None
    return Memory(memory.total, memory.available, limit, allowed.memory_used, swap.total)


def read_space(path: Path) -> Space | None:
    """Of the file system there; None when there is nothing."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(str(path), usage.total, usage.free, os.access(path, os.W_OK | os.X_OK))


def where_runs_go(environ: Mapping[str, str]) -> Space:
    asked = environ.get(f"{env.PET_PREFIX}LOG_DIR") or "runs"
    try:
        directory = Path(asked).absolute()
    except OSError:  # the working directory is gone
        return Space(asked, 0, 0, is_writable=False)
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    found = read_space(there) if os.path.isdir(there) else None  # noqa: PTH112 (Path's raises where one may not look)
    return Space(str(directory), 0, 0, is_writable=False) if found is None else replace(found, path=str(directory))


def read_limits(allowed: Allowance) -> Limits:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return Limits(None, None, None, 0, False)

    def limit(kind: int) -> tuple[int | None, int | None]:
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
        return soft, hard

    own = limit(resource.RLIMIT_NPROC)[0] if os.geteuid() else None  # root is not bound by its own
    used = _threads_of(os.getuid()) if own is not None else 0
    by_container = allowed.processes is not None and (
        own is None or allowed.processes - allowed.processes_used < own - used
    )
    if by_container:
        own, used = allowed.processes, allowed.processes_used
    return Limits(*limit(resource.RLIMIT_NOFILE), own, used, by_container)


def _threads_of(user: int) -> int:
    """The kernel counts threads, not processes."""
    known = procfs.processes().items()
    return sum(found.threads for pid, found in known if procfs.status(pid).get("Uid", "").startswith(f"{user}\t"))


# ---- judgement


def cores(facts: Facts) -> Finding:
    found = facts.cores
    value = f"{found.usable} usable of {found.present}"
    if found.quota is None or found.quota >= found.allowed:
        return Finding("cores", value)
    value += f"; the container's quota is {found.quota:g}"
    more = container_setting(facts, "--cpus 2", "resources.limits.cpu: 2")
    return judged("cores", value, f"a rank is stopped most of the time: {more}", warning=found.quota < 1)


def threads(facts: Facts) -> Finding:
    """Ranks and their OpenMP threads against the cores."""
    ranks, usable, setting = facts.ranks, facts.cores.usable, facts.omp_num_threads
    each, source = max(1, usable // ranks), ""  # as phalanx run would set it
    if setting is not None:
        first = setting.partition(",")[0].strip()  # a list is for nested loops
        if not first.isdigit() or int(first) == 0:
            value = f"OMP_NUM_THREADS={setting!r} is not a number"
            return Finding("threads", value, "warning", "unset OMP_NUM_THREADS")
        each, source = int(first), f", by OMP_NUM_THREADS={setting}"
    value = f"{counted(ranks, 'rank')} × {counted(each, 'thread')} on {counted(usable, 'core')}{source}"
    if ranks > usable:
        also = ", and unset OMP_NUM_THREADS" if each > 1 else ""
        return Finding("threads", value, "warning", f"they take turns: phalanx run --nproc-per-node {usable}{also}")
    advice = "they get in each other's way: unset OMP_NUM_THREADS (phalanx run then divides the cores)"
    return judged("threads", value, advice, warning=ranks * each > usable)


def memory(facts: Facts) -> Finding:
    found = facts.memory
    value = f"{in_bytes(found.left)} free of {in_bytes(found.limit or found.total)}"
    if found.limit is not None:
        value += f", the container's limit (the machine has {in_bytes(found.total)})"
        more = container_setting(facts, "--memory 16g", "resources.limits.memory: 16Gi")
    else:
        more = "end other programs (ps aux --sort -rss)"
    value += f", {in_bytes(found.swap)} swap" if found.swap else ", no swap"
    if found.left < _MEMORY_OF_TORCH:
        return Finding("memory", value, "error", f"not even one rank fits well: {more}")
    fitting = found.left // _MEMORY_OF_TORCH
    advice = f"little for {counted(facts.ranks, 'rank')}: {more}, or phalanx run --nproc-per-node {fitting}"
    return judged("memory", value, advice, warning=facts.ranks > fitting)


def shared_memory(facts: Facts) -> Finding:
    """For the workers of a DataLoader. phalanx's own shared memory does not come from there."""
    found = facts.shared_memory
    if found is None:
        return Finding("/dev/shm", "not there", "error", "mount -t tmpfs -o size=8G tmpfs /dev/shm")
    value = f"{in_bytes(found.free)} free of {in_bytes(found.total)}"
    if not found.is_writable:
        return Finding("/dev/shm", f"{value}, but it cannot be written", "error", "chmod 1777 /dev/shm")
    if found.total >= _SMALL_SHM:
        advice = "somebody's files fill it: ls -l /dev/shm"
    elif facts.container:
        advice = container_setting(facts, "--shm-size 8g", "an emptyDir with medium: Memory at /dev/shm")
    else:
        advice = "mount -o remount,size=8G /dev/shm"
    advice = f"the workers of DataLoaders need more: {advice}"
    return judged("/dev/shm", value, advice, error=found.free < _TINY_SHM, warning=found.free < _SMALL_SHM)


def open_files(facts: Facts) -> Finding:
    soft, hard = facts.limits.files_soft, facts.limits.files_hard
    needed = files_needed(facts.ranks)
    value = f"{_limit(soft)} at most (hard limit {_limit(hard)}), {counted(facts.ranks, 'rank')} need {needed}"
    if hard is not None and hard < needed:
        return Finding("open files", value, "error", _more_files(facts))
    if soft is not None and soft < _FEW_FILES:
        can_raise = hard is None or hard >= _FEW_FILES
        advice = f"ulimit -n {65536 if hard is None else min(hard, 65536)}" if can_raise else _more_files(facts)
        return Finding("open files", value, "warning", f"little for DataLoaders with workers: {advice}")
    return Finding("open files", value)


def files_needed(ranks: int) -> int:
    """By the launcher on one machine. A test keeps this equal to what `phalanx run` insists on."""
    return 12 * ranks + 64


def processes(facts: Facts) -> Finding:
    """The kernel counts threads. A rank has about ten, and so has each worker of its DataLoader."""
    limits = facts.limits
    if limits.processes is None:
        return Finding("processes", "no limit")
    left = limits.processes - limits.processes_used
    whose = "the container's" if limits.processes_by_container else "this user's"
    value = f"{limits.processes_used} of {limits.processes} used, {whose} limit"
    if limits.processes_by_container:
        advice = container_setting(facts, "--pids-limit -1", "podPidsLimit of the kubelet")
    else:
        advice = "ulimit -u unlimited, or as root a line `* soft nproc unlimited` in /etc/security/limits.conf"
    return judged("processes", value, advice, error=left < 8 * facts.ranks, warning=left < 32 * facts.ranks)


def disk(facts: Facts) -> Finding:
    found = facts.runs
    value = f"{in_bytes(found.free)} free of {in_bytes(found.total)} at {found.path}, where runs go"
    elsewhere = "phalanx run --log-dir DIR puts them elsewhere"
    if not found.is_writable:
        return Finding("disk", f"{found.path}, where runs go, cannot be written", "error", elsewhere)
    advice = f"make room; {elsewhere}"
    return judged("disk", value, advice, error=found.free < _TINY_DISK, warning=found.free < _SMALL_DISK)


def _more_files(facts: Facts) -> str:
    if facts.container:
        return container_setting(facts, "--ulimit nofile=65536", "the limit of the container runtime")
    return "as root a line `* - nofile 65536` in /etc/security/limits.conf, then log in again"


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)
