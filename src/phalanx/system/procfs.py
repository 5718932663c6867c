"""The files of /proc as typed values. No other module reads there.

A process may end between any two reads, and some files belong to other users: then a value is empty, never an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
OWN_CGROUPS = PROC / "self/cgroup"
"""The control groups of this process."""


@dataclass(frozen=True)
class Stat:
    """/proc/PID/stat: one process at one moment. Counters are sums since its start."""

    pid: int
    state: str
    """The kernel's letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended."""
    parent: int
    faults: int
    """Pages that had to be read from a disk."""
    cpu: float
    """Seconds of all its threads, and of its children that have ended."""
    threads: int
    start: int
    """Ticks from the boot of the machine to the start of the process."""
    resident: int
    """Bytes."""
    disk_wait: float
    """Seconds in which it waited for a disk."""

    @property
    def lives(self) -> bool:
        """The main thread of a killed process may be a zombie while its other threads are still dying."""
        return self.state not in "ZX" or self.threads > 1


@dataclass(frozen=True)
class ProcessFacts(Stat):
    """The fields that other files of /proc/PID add. What the kernel does not count is zero."""

    swapped: int
    queued: float
    """Seconds in which its first thread could have run, but had no core."""
    moved: int
    """Bytes that it has read and written, from wherever."""
    main_cpu: float = 0.0  # of its first thread alone


# ---- one process


def stat(pid: int | str, proc: Path = PROC) -> Stat | None:
    """None when there is no such process."""
    # The command's name stands in parentheses and may hold spaces and parentheses itself.
    number, _, rest = _text(f"{proc}/{pid}/stat").partition(" (")
    fields = rest.rpartition(")")[2].split()
    if not fields:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return Stat(
        pid=int(number),
        state=fields[0],
        parent=int(fields[1]),
        faults=int(fields[9]),
        cpu=sum(map(int, fields[11:15])) / ticks,
        threads=int(fields[17]),
        start=int(fields[19]),
        resident=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        disk_wait=int(fields[39]) / ticks,
    )


def facts(pid: int) -> ProcessFacts | None:
    """None when there is no such process."""
    found = stat(pid)
    if found is None:
        return None
    queue = _text(f"{PROC}/{pid}/schedstat").split()
    traffic = _fields(f"{PROC}/{pid}/io")
    main = stat(f"{pid}/task/{pid}")
    return ProcessFacts(
        **vars(found),
        swapped=int(status(pid).get("VmSwap", "0").split()[0]) << 10,
        queued=int(queue[1]) / 1e9 if len(queue) == 3 else 0.0,
        moved=int(traffic.get("rchar", 0)) + int(traffic.get("wchar", 0)),
        main_cpu=main.cpu if main is not None else 0.0,
    )


def start_ticks(pid: int | str) -> int:
    """The start of a process, by which it differs from a later one with the same pid; 0 if it has ended."""
    found = stat(pid)
    return 0 if found is None or found.state in "ZX" else found.start


def resident(pid: int) -> int | None:
    """Bytes of a process in memory; None when it has ended."""
    found = stat(pid)
    return None if found is None else found.resident


def status(pid: int | str) -> dict[str, str]:
    """The fields of /proc/PID/status by name."""
    return _fields(f"{PROC}/{pid}/status")


def command(pid: int) -> str:
    """The command line of a process."""
    return _text(f"{PROC}/{pid}/cmdline").replace("\0", " ").strip()


def environment(pid: int) -> list[bytes]:
    """The entries ``NAME=value`` that a process was started with."""
    return _bytes(f"{PROC}/{pid}/environ").split(b"\0")


def owner(pid: int) -> int | None:
    """The user id of a process; None when it has ended."""
    with contextlib.suppress(OSError):
        return os.stat(f"{PROC}/{pid}").st_uid  # noqa: PTH116
    return None


def wchan(pid: int, proc: Path = PROC) -> str:
    """The function of the kernel that a process waits in; not every kernel reports it."""
    return _text(f"{proc}/{pid}/wchan").strip()


def describe(pid: int, proc: Path = PROC) -> str:
    """Its pid, its state, and the function of the kernel that it waits in, for a sentence."""
    found = stat(pid, proc)
    if found is None:
        return f"pid {pid}, which has ended meanwhile"
    meaning = {"D": " (waits for a device or a file system)", "T": " (stopped)", "Z": " (ended)"}.get(found.state, "")
    return f"pid {pid}, state {found.state}{meaning}, wchan {wchan(pid, proc) or 'unknown'}"


def open_files(pid: int | str) -> Iterator[str]:
    """The names of what a process has open: paths, and ``socket:[42]``."""
    for fd in _names(f"{PROC}/{pid}/fd"):
        with contextlib.suppress(OSError):  # it is closed meanwhile
            yield os.readlink(fd_path(pid, fd))  # noqa: PTH115


def sockets(pid: int) -> Iterator[int]:
    """The inodes of the sockets of a process."""
    names = (name.partition(":[") for name in open_files(pid))
    yield from (int(inode.rstrip("]")) for kind, _, inode in names if kind == "socket")


def fd_path(pid: int | str, fd: int | str) -> str:
    """The path by which another process of the same user opens a file descriptor of this one."""
    return f"{PROC}/{pid}/fd/{fd}"


def cgroups(pid: int) -> Path:
    """The file that lists the control groups of a process."""
    return PROC / str(pid) / "cgroup"


def lock_holder(pid: int, locks: Path = PROC / "locks") -> int | None:
    """The process that holds the file lock for which this one waits; None if there is none that can be seen.

    The kernel lists those that wait below the one that holds, with the same number and an arrow.
    """
    holder = None
    for line in _text(locks).splitlines():
        fields = line.split()[1:]
        if fields[:1] == ["->"]:
            if fields[4] == str(pid):
                return holder
        else:
            # 0 and -1: a process that cannot be seen from here.
            holder = int(fields[3]) or None if fields[3].isdigit() else None
    return None


# ---- process trees


def processes() -> dict[int, Stat]:
    """All processes by pid. Zombies are listed too: their children still hang below them."""
    return {int(name): found for name in _names(PROC) if name.isdigit() and (found := stat(name)) is not None}


def families(roots: Collection[int]) -> dict[int, tuple[int, ...]]:
    """The living processes below each of these, parents before their children."""
    known = processes()
    children: dict[int, list[int]] = {}
    for pid, found in known.items():
        children.setdefault(found.parent, []).append(pid)
    below: dict[int, list[int]] = {}
    for root in roots:
        below[root] = [root]
        for pid in below[root]:  # it grows meanwhile
            below[root] += sorted(children.get(pid, ()))
    return {root: tuple(pid for pid in pids[1:] if known[pid].lives) for root, pids in below.items()}


def descendants(root: int) -> set[int]:
    """Every living process below ``root``."""
    return set(families([root])[root])


def living(pids: Collection[int]) -> set[int]:
    """Those of them that have not ended."""
    return {pid for pid in pids if (found := stat(pid)) is not None and found.lives}


def children(pid: int) -> list[int]:
    """The children of the main thread of a process, by one cheap read: a child that starts just now may be missing."""
    return [int(child) for child in _text(f"{PROC}/{pid}/task/{pid}/children").split()]


# ---- this process


def mapped_files() -> set[str]:
    """The files that this process has mapped, its libraries among them."""
    rows = (line.split(maxsplit=5) for line in _text(PROC / "self/maps").splitlines())
    return {row[5] for row in rows if len(row) == 6}


def raise_oom_score(by: int) -> None:
    """Makes the kernel count this process, and those that it starts, as larger when memory runs out."""
    path = PROC / "self/oom_score_adj"
    with contextlib.suppress(OSError, ValueError):  # a system that does not allow it
        path.write_text(str(min(1000, int(path.read_text()) + by)))


def pid_namespace() -> str:
    """The namespace in which the pids that this process sees are valid; empty where there is none."""
    with contextlib.suppress(OSError):
        return os.readlink(f"{PROC}/self/ns/pid")  # noqa: PTH115
    return ""


# ---- the machine


def boot_id() -> str:
    """A new one each time that the machine boots."""
    return _text(PROC / "sys/kernel/random/boot_id").strip()


def memory(proc: Path = PROC) -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    return {name: count << 10 for name, count in counters(_text(proc / "meminfo")).items()}


def oom_kills(proc: Path = PROC) -> int:
    """The processes that the kernel has killed because memory had run out, since the boot."""
    return counters(_text(proc / "vmstat")).get("oom_kill", 0)


def nvidia_driver() -> str:
    """The line in which NVIDIA's driver describes itself; empty when there is none."""
    return _text(PROC / "driver/nvidia/version").partition("\n")[0]


# ---- text


def counters(text: str) -> dict[str, int]:
    """Lines ``name 42`` or ``name: 42 kB``, as the kernel writes them."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _fields(path: str) -> dict[str, str]:
    return {key: value.strip() for key, _, value in (line.partition(":") for line in _text(path).splitlines())}


def _names(directory: str | Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 (a thousand Path objects cost more than the reading)
    except OSError:
        return []


def _text(path: str | Path) -> str:
    """A name that a process has given itself is cut after 15 bytes, whatever character that is in."""
    return _bytes(path).decode(errors="replace")


def _bytes(path: str | Path) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (as above)
            return file.read()
    except OSError:
        return b""
