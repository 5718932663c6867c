"""The resources of a machine for its ranks: cores, memory, open files, processes, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx import env
from phalanx.diagnose.doctor.finding import Facts, Judgement, container_setting, counted, error, ok, warning
from phalanx.system import in_bytes, procfs
from phalanx.system.cgroups import Allowance

_MEMORY_OF_TORCH = 512 << 20
"""Bytes that a process which has imported torch and does something may well use."""
_SMALL_SHM, _TINY_SHM = 1 << 30, 64_000_000
_SMALL_DISK, _TINY_DISK = 1 << 30, 100 << 20
_FEW_FILES, _MANY_FILES = 1024, 65536
_LOCKED_FOR_RDMA = 1 << 30


@dataclass(frozen=True)
class Memory:
    """The memory of the machine and of the container, in bytes."""

    total: int
    available: int
    limit: int | None
    """The container's limit."""
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
    """The limits on files and processes; None means that there is none."""

    files_soft: int | None
    files_hard: int | None
    processes: int | None
    processes_used: int
    processes_by_container: bool
    """``processes`` is the container's limit, not the user's."""
    locked_memory: int | None = None
    """Bytes that a process may lock."""


def read_memory(allowed: Allowance) -> Memory:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit = allowed.memory if allowed.memory is not None and allowed.memory < memory.total else None
    return Memory(memory.total, memory.available, limit, allowed.memory_used, swap.total)


def read_space(path: Path) -> Space | None:
    """The file system at ``path``; None when there is nothing."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(str(path), usage.total, usage.free, os.access(path, os.W_OK | os.X_OK))


def where_runs_go(environ: Mapping[str, str]) -> Space:
    """The file system of the run directories, which need not exist yet."""
    asked = environ.get(f"{env.PET_PREFIX}LOG_DIR") or "runs"
    try:
        directory = Path(asked).absolute()
    except OSError:  # the working directory is gone
        return Space(asked, 0, 0, is_writable=False)
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    found = read_space(there) if os.path.isdir(there) else None  # noqa: PTH112 (Path's raises where one may not look)
    return replace(found or Space("", 0, 0, is_writable=False), path=str(directory))


def read_limits(allowed: Allowance) -> Limits:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return Limits(None, None, None, 0, False)

    def limit(kind: int) -> tuple[int | None, int | None]:
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
        return soft, hard

    files = limit(resource.RLIMIT_NOFILE)
    own = limit(resource.RLIMIT_NPROC)[0] if os.geteuid() else None  # root is not bound by its own
    used = _threads_of(os.getuid()) if own is not None else 0
    locked = limit(resource.RLIMIT_MEMLOCK)[0] if os.geteuid() else None
    most, most_used = allowed.processes, allowed.processes_used
    if most is not None and (own is None or most - most_used < own - used):
        return Limits(*files, most, most_used, True, locked)
    return Limits(*files, own, used, False, locked)


def _threads_of(user: int) -> int:
    """The threads of a user: the kernel counts them, not processes."""
    known = procfs.processes().items()
    return sum(found.threads for pid, found in known if procfs.status(pid).get("Uid", "").startswith(f"{user}\t"))


# ---- checks


def cores(facts: Facts) -> Judgement:
    found = facts.cores
    value = f"{found.usable} usable of {found.present}"
    if found.quota is None or found.quota >= found.allowed:
        return ok(value)
    more = container_setting(facts, "--cpus 2", "resources.limits.cpu: 2")
    value += f"; the container's quota is {found.quota:g}"
    return warning(value, f"a rank is stopped most of the time: {more}", found.quota < 1)


def threads(facts: Facts) -> Judgement:
    """Ranks and their OpenMP threads against the cores."""
    ranks, usable, setting = facts.ranks, facts.cores.usable, facts.omp_num_threads
    each, source = max(1, usable // ranks), ""  # as phalanx run would set it
    if setting is not None:
        first = setting.partition(",")[0].strip()  # a list is for nested loops
        if not first.isdigit() or int(first) == 0:
            return warning(f"OMP_NUM_THREADS={setting!r} is not a number", "unset OMP_NUM_THREADS")
        each, source = int(first), f", by OMP_NUM_THREADS={setting}"
    value = f"{counted(ranks, 'rank')} × {counted(each, 'thread')} on {counted(usable, 'core')}{source}"
    if ranks > usable:
        also = ", and unset OMP_NUM_THREADS" if each > 1 else ""
        return warning(value, f"they take turns: phalanx run --nproc-per-node {usable}{also}")
    advice = "they get in each other's way: unset OMP_NUM_THREADS (phalanx run then divides the cores)"
    return warning(value, advice, ranks * each > usable)


def memory(facts: Facts) -> Judgement:
    found = facts.memory
    value = f"{in_bytes(found.left)} free of {in_bytes(found.limit or found.total)}"
    more = "end other programs (ps aux --sort -rss)"
    if found.limit is not None:
        value += f", the container's limit (the machine has {in_bytes(found.total)})"
        more = container_setting(facts, "--memory 16g", "resources.limits.memory: 16Gi")
    value += f", {in_bytes(found.swap)} swap" if found.swap else ", no swap"
    fitting = found.left // _MEMORY_OF_TORCH
    if fitting < 1:
        return error(value, f"not even one rank fits well: {more}")
    advice = f"little for {counted(facts.ranks, 'rank')}: {more}, or phalanx run --nproc-per-node {fitting}"
    return warning(value, advice, facts.ranks > fitting)


def shared_memory(facts: Facts) -> Judgement:
    """The workers of a DataLoader need it. phalanx's own shared memory does not come from there."""
    found = facts.shared_memory
    if found is None:
        return error("not there", "mount -t tmpfs -o size=8G tmpfs /dev/shm")
    value = f"{in_bytes(found.free)} free of {in_bytes(found.total)}"
    if not found.is_writable:
        return error(f"{value}, but it cannot be written", "chmod 1777 /dev/shm")
    if found.total >= _SMALL_SHM:
        advice = "somebody's files fill it: ls -l /dev/shm"
    elif facts.container:
        advice = container_setting(facts, "--shm-size 8g", "an emptyDir with medium: Memory at /dev/shm")
    else:
        advice = "mount -o remount,size=8G /dev/shm"
    return _graded(value, f"the workers of DataLoaders need more: {advice}", found.free, _TINY_SHM, _SMALL_SHM)


def open_files(facts: Facts) -> Judgement:
    soft, hard = facts.limits.files_soft, facts.limits.files_hard
    needed = files_needed(facts.ranks)
    value = f"{_limit(soft)} at most (hard limit {_limit(hard)}), {counted(facts.ranks, 'rank')} need {needed}"
    more = f"as root a line `* - nofile {_MANY_FILES}` in /etc/security/limits.conf, then log in again"
    if facts.container:
        more = container_setting(facts, f"--ulimit nofile={_MANY_FILES}", "the limit of the container runtime")
    if hard is not None and hard < needed:
        return error(value, more)
    if hard is None or hard >= _FEW_FILES:
        more = f"ulimit -n {_MANY_FILES if hard is None else min(hard, _MANY_FILES)}"
    return warning(value, f"little for DataLoaders with workers: {more}", soft is not None and soft < _FEW_FILES)


def files_needed(ranks: int) -> int:
    """The open files of the launcher on one machine. A test keeps this equal to what `phalanx run` requires."""
    return 12 * ranks + 64


def processes(facts: Facts) -> Judgement:
    """The kernel counts threads. A rank has about ten, and so has each worker of its DataLoader."""
    limits = facts.limits
    if limits.processes is None:
        return ok("no limit")
    whose = "the container's" if limits.processes_by_container else "this user's"
    value = f"{limits.processes_used} of {limits.processes} used, {whose} limit"
    advice = "ulimit -u unlimited, or as root a line `* soft nproc unlimited` in /etc/security/limits.conf"
    if limits.processes_by_container:
        advice = container_setting(facts, "--pids-limit -1", "podPidsLimit of the kubelet")
    return _graded(value, advice, limits.processes - limits.processes_used, 8 * facts.ranks, 32 * facts.ranks)


def locked_memory(facts: Facts) -> Judgement | None:
    """RDMA locks the memory that it sends from; nothing else of a run does."""
    limit = facts.limits.locked_memory
    more = container_setting(facts, "--ulimit memlock=-1", "the limit of the container runtime")
    more = more if facts.container else "as root a line `* - memlock unlimited` in /etc/security/limits.conf"
    value = "no limit" if limit is None else f"{in_bytes(limit)} at most"
    found = warning(value, f"too little for RDMA: {more}", limit is not None and limit < _LOCKED_FOR_RDMA)
    return found if facts.network.rdma else None


def disk(facts: Facts) -> Judgement:
    found = facts.runs
    elsewhere = "phalanx run --log-dir DIR puts them elsewhere"
    if not found.is_writable:
        return error(f"{found.path}, where runs go, cannot be written", elsewhere)
    value = f"{in_bytes(found.free)} free of {in_bytes(found.total)} at {found.path}, where runs go"
    return _graded(value, f"make room; {elsewhere}", found.free, _TINY_DISK, _SMALL_DISK)


def _graded(value: str, advice: str, left: int, tiny: int, small: int) -> Judgement:
    """An error when there is less left than ``tiny``, a warning below ``small``."""
    return error(value, advice) if left < tiny else warning(value, advice, left < small)


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)
