"""All that is known of a rank that makes no progress, as a record that can be sent to another node."""

from __future__ import annotations

from typing import Protocol

from phalanx.devices.gpu_state import GpuState
from phalanx.events import ErrorRecord, ThreadDeath
from phalanx.messages import Count, ExitCode, Name, Pid, Rank, Record, Seconds, Text
from phalanx.status import stack_parser
from phalanx.status.reading import Collective, Status
from phalanx.status.stack_parser import Thread

UNNAMED = "collective"
MESSAGES = ("send", "recv")
_BUSY = 0.2
_MOVES = 10_000.0


class Vitals(Record, frozen=True):
    """A process as the kernel reports it, over the last seconds."""

    pid: Pid
    state: Name
    """R runs, S sleeps, D waits for a disk, T is stopped, t is held by a debugger, Z has ended."""
    cpu: float = 0.0
    """Cores in use by all its threads, or by the main thread of a rank on a GPU: 1.0 is one."""
    bytes_moved: float = 0.0
    """Bytes per second, read and written: files, pipes, connections."""
    faults: float = 0.0
    """Pages per second that were read from a disk."""
    swapped: Count = 0
    """Bytes in swap space."""
    resident: Count = 0
    waits_in: Name = ""
    """The kernel function that its main thread sleeps in."""
    lock_holder: Text = ""
    """Pid and command of the process that holds the file lock that it waits for."""
    waits_for_disk: bool = False
    """True if it waited for a disk most of the time."""
    wants_cpu: bool = False
    """True if it could run most of the time, whether it had a core or not."""

    @property
    def computes(self) -> bool:
        return self.cpu > _BUSY or self.wants_cpu

    @property
    def works(self) -> bool:
        return self.computes or self.moves or self.waits_for_disk

    @property
    def moves(self) -> bool:
        return self.bytes_moved > _MOVES


class Child(Record, frozen=True):
    """A process that a rank has started, such as a worker of its data loader."""

    vitals: Vitals
    command: Text
    threads: tuple[Thread, ...] = ()


class RankRecord(Record, frozen=True):
    """All that is known of one rank."""

    rank: Rank
    host: Name = ""
    status: Status | None = None
    """None if it has no page."""
    quiet: Seconds = 0.0
    """Seconds since its last progress."""
    vitals: Vitals | None = None
    """None if it has ended."""
    threads: tuple[Thread, ...] = ()
    children: tuple[Child, ...] = ()
    exit_code: ExitCode | None = None
    """None if it runs."""
    thread_death: ThreadDeath | None = None
    """The last thread that has died."""
    unreachable: Text = ""
    """The reason why the store that it connects to cannot be reached from its node."""
    gpu: GpuState | None = None

    @property
    def device(self) -> str:
        """The state of its accelerator, one of layout.DEVICE_STATES."""
        return self.status.device if self.status else ""

    @property
    def waits_in(self) -> Collective | None:
        """The collective that it has called and that has not ended. A stopped rank waits for no other."""
        page = self.status
        if page is None or self.vitals is None or self.vitals.state in "Tt":
            return None
        return page.open_collective or _unnamed(page)

    def asked(self, group: str) -> list[Collective]:
        """Returns its last collectives of a group, oldest first. A group that is created again counts from 0 again."""
        found: list[Collective] = []
        for one in self.status.collectives if self.status else ():
            if one.op == "init_process_group" or (one.group == group and found and one.number < found[-1].number):
                found.clear()
            if one.group == group and one.op not in MESSAGES:
                found.append(one)
        return found

    @property
    def has_joined(self) -> bool:
        """True if it has a process group. Torch's flight recorder shows a group only when it is used."""
        page = self.status
        ended = [one.op for one in page.collectives if one.state == "done"] if page is not None else []
        return page is not None and (bool(page.groups) or "init_process_group" in ended)

    @property
    def main(self) -> Thread | None:
        return stack_parser.main_thread(self.threads)


def _unnamed(page: Status) -> Collective | None:
    """Returns a collective that is known by its number alone, until the rank has written more, or by its device."""
    ended = {(one.group, one.number) for one in page.collectives}  # none of them is open
    last = [(one.name, one.enqueued or 0) for one in page.groups if (one.enqueued or 0) > (one.completed or 0)]
    found = [one for one in last if one not in ended] or ([("", 0)] if page.device == "waits" else [])
    return Collective(*found[0], UNNAMED, "", 0, None, "running", page.since, None, None, None) if found else None


# ---- a rank's process as a watchdog sees it


class ProcessExit(Protocol):
    """The end of a process, as the kernel reports it."""

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
