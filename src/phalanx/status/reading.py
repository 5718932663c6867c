"""The reading side of a status page: turns its bytes into records, whether the rank lives or not."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from struct import Struct
from typing import Any, Literal

from phalanx import run_files
from phalanx.messages import Count, Record, Text
from phalanx.status import layout

_TRIES = 100
_MOST_RANKS = 1 << 20


class CodeLine(Record, frozen=True):
    """A line of code, of a stack or from which a collective was called."""

    file: Text
    line: Count
    function: Text
    source: Text = ""
    """The text of the line; empty as long as it has not been looked up."""
    loops: tuple[tuple[int, int], ...] = ()
    """The first and last lines of the loops of its function that it is in, outermost first."""
    is_users: bool = True

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


class Group(Record, frozen=True):
    """A process group, as one of its ranks sees it."""

    name: str
    ranks: tuple[Count, ...]
    enqueued: Count | None
    """The number of the last collective in torch's flight recorder; None for a group that it does not record."""
    completed: Count | None


class Collective(Record, frozen=True):
    """A collective that a rank has called."""

    group: str
    number: Count
    """The number in its group: the same on all of its ranks, as long as they call the same collectives."""
    op: str
    dtype: str
    """Empty if it carries no data."""
    size: Count
    """The number of elements."""
    peer: Count | None
    """The other rank of send and recv, as the group numbers it."""
    state: Literal["queued", "running", "done", "failed"]
    queued_at: float
    started_at: float | None
    ended_at: float | None
    place: CodeLine | None
    """The user's line that called it."""

    @property
    def is_open(self) -> bool:
        return self.state in ("queued", "running")


class Status(Record, frozen=True):
    """The state of a rank when it last wrote."""

    pid: Count
    rank: Count
    world_size: Count
    started_at: float
    phase: str
    since: float
    """When the phase began: the last sign of life of the loop. All times are seconds since 1970."""
    epoch: Count
    step: Count
    """The step in this epoch, counted by px.track."""
    samples: Count
    updates: Count
    """The number of optimizer steps."""
    beats: Count
    """The number of writes about the loop."""
    ended: Count
    """Grows with each collective on shm that ends; for other backends, see groups."""
    waited: float
    """Seconds in these collectives."""
    seconds: Mapping[str, float]
    """Seconds in each phase, up to the beginning of this one."""
    groups: tuple[Group, ...]
    collectives: tuple[Collective, ...]
    """Oldest first."""
    blocked: Mapping[str, float] = {}
    """Seconds of each phase in which its loop waited for other ranks."""
    blocked_since: float | None = None
    """When its loop began to wait, if it waits now."""
    ticks: Count = 0
    """When its process began, in the kernel's ticks, which a change of the clock does not affect. 0: not known."""
    checkpoint: Count = 0
    """The step of the last checkpoint that px.Checkpointer has saved or loaded."""
    connecting: str = ""
    """The store that it is connecting to, as host:port."""
    device: str = ""
    """The state of its accelerator, one of layout.DEVICE_STATES."""
    device_steps: Count = 0
    device_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """By the device's clock: own work, waiting for other ranks, waiting for data."""

    @property
    def progress(self) -> tuple[int, ...]:
        """A value that changes when the rank makes progress: its loop, an optimizer's step, a collective that ends."""
        return self.beats, self.ended, sum(group.completed or 0 for group in self.groups), self.device_steps

    @property
    def open_collective(self) -> Collective | None:
        """The oldest collective that has not ended: the one that the rank waits in."""
        return next((collective for collective in self.collectives if collective.is_open), None)


def read(path: Path) -> Status | None:
    """Reads a page. None if there is none, or if it is not ours."""
    for _ in range(_TRIES):
        try:
            data, again = (run_files.read(path, most=layout.PAGE_BYTES) for _ in range(2))
        except PermissionError:
            raise
        except OSError:  # there is none, or another kind of file has its name
            return None
        if len(data) < layout.PAGE_BYTES or data[:8] != layout.MAGIC:
            return None
        page = _Page(data, again)
        if page.words[1] != layout.VERSION:
            return None
        loop = page.record(layout.LOOP, layout.LOOP_RECORD)
        if loop is not None:
            try:
                return _parsed(page, *loop)
            except (IndexError, ValueError):  # numbers that we do not write
                return None
    return None  # the rank died while writing


def pulse(path: Path) -> tuple[int, ...] | None:
    """Returns a value that changes when `Status.progress` does, and costs less. A torn read is a change as well."""
    try:
        data = run_files.read(path, most=layout.RING * layout.WORD)
    except OSError:
        return None
    if len(data) < layout.RING * layout.WORD or data[:8] != layout.MAGIC:
        return None
    words = memoryview(data).cast("Q")
    groups = range(layout.GROUP, layout.GROUP + layout.GROUPS * layout.GROUP_WORDS, layout.GROUP_WORDS)
    completed = sum(words[at + layout.GROUP_WORDS - 2] for at in groups)
    # The seconds in collectives grow with each that ends.
    return words[layout.LOOP], words[layout.WAITED], completed, words[layout.DEVICE_STEPS]


def ask(path: Path, seconds: float, word: int = layout.ASKED) -> bool:
    """Asks a living rank to bring its page up to date, and returns True if it has done so in time.

    With STACKS_ASKED, to write the stacks of all its threads to `stacks_path`, if it has a thread left that can.
    """
    with (
        os.fdopen(run_files.open_to_read(path, os.O_RDWR), "r+b") as file,
        mmap.mmap(file.fileno(), layout.PAGE_BYTES) as page,
        memoryview(page) as whole,
        whole.cast("Q") as words,
    ):
        words[word] += 1
        deadline = time.monotonic() + seconds
        # The rank looks several times a second; memory has no event to wait for.
        while words[word] != words[word + 1]:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
    return True


class _Page:
    """Two copies of a page, read one after the other."""

    def __init__(self, data: bytes, again: bytes) -> None:
        self.data, self._again = data, again
        self.words, self.doubles = memoryview(data).cast("Q"), memoryview(data).cast("d")

    def record(self, at: int, shape: Struct) -> tuple[Any, ...] | None:
        """Returns a record without its two numbers; None when it is empty, or was being written."""
        start = at * layout.WORD
        found = shape.unpack_from(self.data, start)
        is_same = self.data[start : start + shape.size] == self._again[start : start + shape.size]
        return found[1:-1] if is_same and found[0] == found[-1] != 0 else None


def _parsed(
    page: _Page, phase: int, beats: int, epoch: int, step: int, samples: int, updates: int, since: float
) -> Status:
    pid, rank, world_size = page.words[2:5]
    if max(rank, world_size) > _MOST_RANKS:
        raise ValueError(f"rank {rank} of {world_size}")
    seconds, blocked = (
        {name: page.doubles[first + index] for index, name in enumerate(layout.PHASES)}
        for first in (layout.SECONDS, layout.BLOCKED)
    )
    groups = _groups(page)
    recorded = _collectives(page, groups, layout.RING, layout.RING_ENTRIES)
    ended = max((entry for _, entry, collective in recorded if not collective.is_open), default=0)
    collectives = recorded + _collectives(page, groups, layout.FLIGHT, layout.FLIGHT_ENTRIES)
    collectives.sort(key=lambda found: found[:2])
    in_call = (one.queued_at for _, _, one in recorded if one.state == "running" and one.started_at == one.queued_at)
    return Status(
        *(pid, rank, world_size, page.doubles[5], layout.PHASES[phase], since),
        *(epoch, step, samples, updates, beats, ended, page.doubles[layout.WAITED]),
        *(seconds, tuple(groups.values())),
        tuple(collective for _, _, collective in collectives),
        blocked,
        page.doubles[layout.BLOCKED_SINCE] or next(in_call, None),  # a synchronous collective was never queued
        ticks=page.words[6],
        checkpoint=page.words[layout.CHECKPOINT_STEP],
        connecting=_text(page.data[layout.CONNECTING * layout.WORD :][: layout.CONNECTING_BYTES]),
        device=layout.DEVICE_STATES[page.words[layout.DEVICE_STATE]],
        device_steps=page.words[layout.DEVICE_STEPS],
        device_seconds=layout.DEVICE_TIMES.unpack_from(page.data, layout.DEVICE_SECONDS * layout.WORD),
    )


def _groups(page: _Page) -> dict[int, Group]:
    found = {}
    for slot in range(layout.GROUPS):
        record = page.record(layout.GROUP + slot * layout.GROUP_WORDS, layout.GROUP_RECORD)
        if record is not None:
            number, name, ranks, *counts = record
            found[number] = Group(_text(name), _spread(_text(ranks)), *(one - 1 if one else None for one in counts))
    return found


def _collectives(page: _Page, groups: dict[int, Group], first: int, count: int) -> list[tuple[float, int, Collective]]:
    """Returns collectives with their time and their number in the page: two may have the same time."""
    found = []
    for at in range(first, first + count * layout.ENTRY_WORDS, layout.ENTRY_WORDS):
        record = page.record(at, layout.ENTRY_RECORD)
        if record is None:
            continue
        kind, number, size, peer, place, queued, started, ended = record
        group = groups.get(kind >> 24)
        state = ("failed" if kind & 1 else "done") if ended else "running" if started else "queued"
        collective = Collective(
            *(group.name if group else "", number),
            *(layout.OPERATIONS[kind >> 16 & 0xFF], layout.DTYPES[kind >> 8 & 0xFF], size),
            *(peer if peer != layout.NO_PEER else None, state, queued, started or None, ended or None),
            _place(page, place),
        )
        found.append((queued, page.words[at], collective))
    return found


def _place(page: _Page, slot: int) -> CodeLine | None:
    if slot >= layout.PLACES:
        return None
    at = layout.PLACE + slot * layout.PLACE_WORDS
    start = (at + 1) * layout.WORD
    line, _, rest = page.data[start : start + page.words[at]].decode(errors="replace").partition("\0")
    function, _, file = rest.partition("\0")
    return CodeLine(file, int(line), function) if line.isdigit() else None


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def _spread(text: str) -> tuple[int, ...]:
    """Returns 0, 1, 2, 3, 6 for 0-3,6. A rank that was cut off at the end is left out."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()) and int(last or first) < _MOST_RANKS:
            ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)
