"""All that is known of a rank that stands still: frozen, and fit for a trip to another node."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.events import ThreadDeath
from phalanx.messages import Count, ExitCode, Name, Pid, Rank, Record, Seconds, Text
from phalanx.status import stack_parser
from phalanx.status.reading import CodeLine, Collective, Status
from phalanx.status.stack_parser import Thread

UNNAMED = "collective"
MESSAGES = ("send", "recv")
_BUSY = 0.2
_MOVES = 10_000.0


class Vitals(Record, frozen=True):
    """What the kernel says of a process, over the last seconds."""

    pid: Pid
    state: Name
    """R runs, S sleeps, D waits for a disk, T is stopped, t is held by a debugger, Z has ended."""
    cpu: float = 0.0
    """Cores in use by all its threads: 1.0 is one."""
    bytes_moved: float = 0.0
    """A second, read and written: files, pipes, connections."""
    faults: float = 0.0
    """Pages a second that had to come from a disk."""
    swapped: Count = 0
    """Bytes of it that are in swap space."""
    resident: Count = 0
    waits_in: Name = ""
    """The kernel's function that its main thread sleeps in."""
    lock_holder: Text = ""
    """Of the lock on a file that it waits for: pid and command."""
    waits_for_disk: bool = False
    """Most of the time."""
    wants_cpu: bool = False
    """Most of the time, whether it gets one or not."""

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
    """One rank."""

    rank: Rank
    host: Name = ""
    status: Status | None = None
    """None: it has no page."""
    quiet: Seconds = 0.0
    """Seconds since its last progress."""
    vitals: Vitals | None = None
    """None: it has ended."""
    threads: tuple[Thread, ...] = ()
    children: tuple[Child, ...] = ()
    exit_code: ExitCode | None = None
    """None: it runs."""
    sources: Mapping[str, str] = {}
    """The text of the lines that asked for its last collectives, by ``file:line``."""
    thread_death: ThreadDeath | None = None
    """The last one."""
    unreachable: Text = ""
    """Why the store that it is connecting to cannot be reached from its node."""

    @property
    def waits_in(self) -> Collective | None:
        """The collective that it has asked for and that has not ended. A stopped rank waits for nobody."""
        if self.status is None or self.vitals is None or self.vitals.state in "Tt":
            return None
        return self.status.open_collective or _unnamed(self.status)

    def asked(self, group: str) -> list[Collective]:
        """The last collectives of a group that it has asked for, oldest first. A group made anew counts anew."""
        found: list[Collective] = []
        for one in self.status.collectives if self.status else ():
            if one.op == "init_process_group" or (one.group == group and found and one.number < found[-1].number):
                found.clear()
            if one.group == group and one.op not in MESSAGES:
                found.append(one)
        return found

    @property
    def has_joined(self) -> bool:
        """It has a process group. Torch's flight recorder shows one only when it is used."""
        page = self.status
        return page is not None and bool(page.groups or any(map(_is_joining_done, page.collectives)))

    def source_of(self, place: CodeLine | None) -> str:
        return self.sources.get(f"{place.file}:{place.line}", "") if place else ""

    @property
    def main(self) -> Thread | None:
        return stack_parser.main_thread(self.threads)


def _unnamed(page: Status) -> Collective | None:
    """How far a group has come is known at once, which collective it is in when the rank finds the time to write it."""
    ended = {(one.group, one.number) for one in page.collectives}  # if one were open, it would have a name
    for group in page.groups:
        has_more = group.enqueued is not None and group.enqueued > (group.completed or 0)
        if group.enqueued is not None and has_more and (group.name, group.enqueued) not in ended:
            return Collective(group.name, group.enqueued, UNNAMED, "", 0, None, "running", page.since, None, None, None)
    return None


def _is_joining_done(one: Collective) -> bool:
    return one.op == "init_process_group" and one.state == "done"
