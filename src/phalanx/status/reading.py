"""The reading side: from the bytes of a page, of a living rank or a dead one, to records."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from struct import Struct
from typing import Any

from phalanx import run_files
from phalanx.messages import Count, Record
from phalanx.status import layout

_TRIES = 100
_MOST_RANKS = 1 << 20


class CodeLine(Record, frozen=True):
    """A line of somebody's code."""

    file: str
    line: Count
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


class Group(Record, frozen=True):
    """A process group, as one of its ranks knows it."""

    name: str
    ranks: tuple[Count, ...]
    enqueued: Count | None
    """The number of the last collective that torch's flight recorder has seen asked for; None: not one that it sees."""
    completed: Count | None


class Collective(Record, frozen=True):
    """One of the last ones of a rank."""

    group: str
    number: Count
    """In its group; the same on all of its ranks, as long as they ask for the same."""
    op: str
    dtype: str
    """Empty if it carries nothing."""
    size: Count
    """Elements."""
    peer: Count | None
    """Of send and recv, in the group's numbers."""
    state: str
    """queued, running, done or failed"""
    queued_at: float
    started_at: float | None
    ended_at: float | None
    place: CodeLine | None
    """The user's line that asked for it."""

    @property
    def is_open(self) -> bool:
        return self.state in ("queued", "running")


class Status(Record, frozen=True):
    """What a rank was doing when it last wrote."""

    pid: Count
    rank: Count
    world_size: Count
    started_at: float
    phase: str
    since: float
    """When the phase began: the last sign of life of its loop. All times are seconds since 1970."""
    epoch: Count
    step: Count
    """In this epoch, counted by px.track."""
    samples: Count
    updates: Count
    """Steps of optimizers."""
    beats: Count
    """Grows with everything that the rank writes about its loop."""
    ended: Count
    """Grows with the collectives that have ended, on shm; for other backends, see groups."""
    waited: float
    """Seconds in those."""
    seconds: Mapping[str, float]
    """In each phase, up to the beginning of this one."""
    groups: tuple[Group, ...]
    collectives: tuple[Collective, ...]
    """Oldest first."""
    blocked: Mapping[str, float] = {}
    """Seconds of each phase in which its loop waited for other ranks."""
    blocked_since: float | None = None
    """When it began to, if it waits now."""
    ticks: Count = 0
    """When its process began, by the kernel's own count: no change of the clock changes that. 0: not known."""
    checkpoint: Count = 0
    """The step of the last checkpoint that px.Checkpointer has saved or loaded."""
    connecting: str = ""
    """The store that it is connecting to, as host:port."""

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes when the rank gets on: its loop, an optimizer's step, a collective that ends."""
        return self.beats, self.ended, sum(group.completed or 0 for group in self.groups)

    @property
    def open_collective(self) -> Collective | None:
        """The oldest one that has not ended: it is the one that the rank waits in."""
        return next((collective for collective in self.collectives if collective.is_open), None)


def read(path: Path) -> Status | None:
    """What stands in the page; None when there is none, or none of ours."""
    for _ in range(_TRIES):
        try:
            page, again = (_Page(run_files.read(path, most=layout.PAGE_BYTES)) for _ in range(2))
        except PermissionError:
            raise
        except OSError:  # there is none, or something else has its name
            return None
        if len(page.data) < layout.PAGE_BYTES or page.data[:8] != layout.MAGIC or page.words[1] != layout.VERSION:
            return None
        if page.record(layout.LOOP, layout.LOOP_RECORD, again) is not None:
            try:
                return _parsed(page, again)
            except (IndexError, ValueError):  # numbers that we do not write
                return None
    return None  # it died while writing


def pulse(path: Path) -> tuple[int, ...] | None:
    """Changes when `Status.progress` does, for those who look all the time. A torn read is a change as well."""
    try:
        data = run_files.read(path, most=layout.RING * layout.WORD)
    except OSError:
        return None
    if len(data) < layout.RING * layout.WORD or data[:8] != layout.MAGIC:
        return None
    beats = layout.LOOP_RECORD.unpack_from(data, layout.LOOP * layout.WORD)[0]
    # The seconds in collectives grow with each that ends.
    waited = int.from_bytes(data[layout.WAITED * layout.WORD : (layout.WAITED + 1) * layout.WORD], sys.byteorder)
    groups = range(layout.GROUP, layout.GROUP + layout.GROUPS * layout.GROUP_WORDS, layout.GROUP_WORDS)
    return beats, waited, sum(layout.GROUP_RECORD.unpack_from(data, at * layout.WORD)[-2] for at in groups)


def ask(path: Path, seconds: float) -> bool:
    """Asks a living rank to bring its page up to date; whether it has answered in time."""
    return _ask(path, layout.ASKED, seconds)


def ask_stacks(path: Path, seconds: float) -> bool:
    """Asks it to write the stacks of all its threads to `stacks_path`. It answers if it has a thread left to do so."""
    return _ask(path, layout.STACKS_ASKED, seconds)


def _ask(path: Path, word: int, seconds: float) -> bool:
    """The answer is in the next word."""
    with (
        os.fdopen(run_files.open_to_read(path, os.O_RDWR), "r+b") as file,
        mmap.mmap(file.fileno(), layout.PAGE_BYTES) as page,
        memoryview(page) as whole,
        whole.cast("Q") as words,
    ):
        words[word] += 1
        deadline = time.monotonic() + seconds
        # It looks several times a second; memory has no event to wait for.
        while words[word] != words[word + 1]:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
    return True


class _Page:
    """A copy of one."""

    def __init__(self, data: bytes) -> None:
        self.data = data[: layout.PAGE_BYTES]
        whole = memoryview(self.data if len(data) >= layout.PAGE_BYTES else bytes(layout.PAGE_BYTES))
        self.words, self.doubles = whole.cast("Q"), whole.cast("d")

    def record(self, at: int, shape: Struct, again: _Page) -> tuple[Any, ...] | None:
        """Without its two numbers; None when it is empty, or was being written."""
        start = at * layout.WORD
        found = shape.unpack_from(self.data, start)
        is_same = self.data[start : start + shape.size] == again.data[start : start + shape.size]
        return found[1:-1] if is_same and found[0] == found[-1] != 0 else None


def _parsed(page: _Page, again: _Page) -> Status:
    loop = page.record(layout.LOOP, layout.LOOP_RECORD, again)
    assert loop is not None
    phase, beats, epoch, step, samples, updates, since = loop
    pid, rank, world_size = page.words[2:5]
    if max(rank, world_size) > _MOST_RANKS:
        raise ValueError(f"rank {rank} of {world_size}")
    seconds, blocked = (
        {name: page.doubles[first + index] for index, name in enumerate(layout.PHASES)}
        for first in (layout.SECONDS, layout.BLOCKED)
    )
    groups = _groups(page, again)
    recorded = _collectives(page, again, groups, layout.RING, layout.RING_ENTRIES)
    ended = max((entry for _, entry, collective in recorded if not collective.is_open), default=0)
    collectives = sorted(
        recorded + _collectives(page, again, groups, layout.FLIGHT, layout.FLIGHT_ENTRIES),
        key=lambda found: found[:2],
    )
    return Status(
        *(pid, rank, world_size, page.doubles[5], layout.PHASES[phase], since),
        *(epoch, step, samples, updates, beats, ended, page.doubles[layout.WAITED]),
        *(seconds, tuple(groups.values())),
        tuple(collective for _, _, collective in collectives),
        *(blocked, page.doubles[layout.BLOCKED_SINCE] or _in_a_call([one for _, _, one in recorded])),
        ticks=page.words[6],
        checkpoint=page.words[layout.CHECKPOINT_STEP],
        connecting=_text(page.data[layout.CONNECTING * layout.WORD :][: layout.CONNECTING_BYTES]),
    )


def _in_a_call(collectives: list[Collective]) -> float | None:
    """Since when the loop is in a synchronous collective: one that was never queued."""
    waits = (one.queued_at for one in collectives if one.state == "running" and one.started_at == one.queued_at)
    return next(waits, None)


def _groups(page: _Page, again: _Page) -> dict[int, Group]:
    found = {}
    for slot in range(layout.GROUPS):
        record = page.record(layout.GROUP + slot * layout.GROUP_WORDS, layout.GROUP_RECORD, again)
        if record is not None:
            number, name, ranks, enqueued, completed = record
            found[number] = Group(
                _text(name),
                _spread(_text(ranks)),
                enqueued - 1 if enqueued else None,
                completed - 1 if completed else None,
            )
    return found


def _collectives(
    page: _Page, again: _Page, groups: dict[int, Group], first: int, count: int
) -> list[tuple[float, int, Collective]]:
    """With what they are sorted by: a clock may stand still between two of them."""
    found = []
    for at in range(first, first + count * layout.ENTRY_WORDS, layout.ENTRY_WORDS):
        record = page.record(at, layout.ENTRY_RECORD, again)
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
    """The opposite of the page's short form; what was cut off at its end is left out."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()) and int(last or first) < _MOST_RANKS:
            ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)
