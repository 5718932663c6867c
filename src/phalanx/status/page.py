"""The writing side of a status page. Every write is a store into memory; the end of the process closes it.

A collective of shm may take less than ten microseconds, and this is in the way of every one. So there are no small
functions here where a call would cost more than what it does.
"""

from __future__ import annotations

import itertools
import mmap
import os
from _thread import get_ident
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import _getframe
from time import time
from typing import Any

from phalanx import run_files
from phalanx.status import layout
from phalanx.status.code_lines import CodeLines
from phalanx.status.layout import (
    BLOCKED,
    BLOCKED_SINCE,
    ENTRY_WORDS,
    NO_PEER,
    NO_PLACE,
    RING,
    RING_ENTRIES,
    WAITED,
    WORD,
    runs_of,
)
from phalanx.status.windows import Cutter
from phalanx.system import procfs

_LOOP_AT, _RING_AT, _ENTRY_BYTES = layout.LOOP * WORD, RING * WORD, ENTRY_WORDS * WORD
_pack_loop, _pack_entry = layout.LOOP_RECORD.pack_into, layout.ENTRY_RECORD.pack_into


@dataclass(frozen=True)
class Flight:
    """A collective as torch's flight recorder has it, in the page's numbers."""

    kind: int
    number: int
    size: int
    queued_at: float
    started_at: float
    ended_at: float
    place: tuple[str, int, str] | None
    """File, line, function."""
    peer: int = NO_PEER


class StatusPage:
    """Of this process."""

    def __init__(self, path: Path, rank: int = 0, world_size: int = 1) -> None:
        fd = run_files.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            # A store into memory that a full disk cannot hold would kill us, so its blocks are taken now.
            (os.posix_fallocate if hasattr(os, "posix_fallocate") else _lengthen)(fd, 0, layout.PAGE_BYTES)
            self.memory = mmap.mmap(fd, layout.PAGE_BYTES)
        finally:
            os.close(fd)
        self.memory[:] = bytes(layout.PAGE_BYTES)  # an earlier attempt's, which somebody may have mapped
        whole = memoryview(self.memory)
        self._words, self._doubles = whole.cast("Q"), whole.cast("d")
        self._phase = layout.STARTED
        self._since = time()
        self._beats = self._epoch = self._step = self._samples = self._updates = 0
        self._groups: dict[str, int] = {}
        self._next_group = itertools.count()
        self._in_slots = [-1] * layout.GROUPS
        """The group that is noted in each."""
        self._recorded = self._writes = 0
        self.thread = get_ident()  # the one that makes it is the one with the loop
        self._blocked_since = 0.0
        """Since when it waits for other ranks otherwise than in a collective of its own."""
        self._cutter = Cutter(self.memory)
        self.places = CodeLines(self.memory)
        self._known = self.places.known
        self._write_loop()
        for word, value in enumerate((layout.VERSION, os.getpid(), rank, world_size), 1):
            self._words[word] = value
        self._doubles[5], self._words[6] = self._since, procfs.start_ticks("self")
        self.memory[: len(layout.MAGIC)] = layout.MAGIC

    # ---- the loop

    def enter(self, phase: int) -> int:
        """This rank is in this phase from now on; returns the one before."""
        before, now = self._phase, time()
        self._doubles[layout.SECONDS + before] += now - self._since
        self._phase, self._since = phase, now
        self._write_loop()
        return before

    def beat(self, phase: int, epoch: int, step: int, samples: int) -> None:
        """What px.track knows beside the phase."""
        self._epoch, self._step, self._samples = epoch, step, samples
        self.enter(phase)

    def stepped(self, then: int) -> None:
        """An optimizer has made a step, and this rank is in another phase from now on."""
        self._updates += 1
        self.enter(then)
        if self._updates == self._cutter.due:
            doubles = self._doubles
            own = tuple(doubles[layout.SECONDS + phase] - doubles[BLOCKED + phase] for phase in layout.OWN)
            self._cutter.cut(own, self._since)

    def checkpointed(self, step: int) -> None:
        """The state of this step is in a whole checkpoint, just saved or loaded."""
        self._words[layout.CHECKPOINT_STEP] = step

    def connecting(self, address: str) -> None:
        """To a store; the empty address says that this is over. One that is too long for the page is not noted."""
        at = layout.CONNECTING * WORD
        data = address.encode()
        if len(data) > layout.CONNECTING_BYTES:
            data = b""
        self.memory[at : at + layout.CONNECTING_BYTES] = data.ljust(layout.CONNECTING_BYTES, b"\0")

    def tick(self) -> None:
        """It gets on."""
        self._write_loop()

    @property
    def is_joining(self) -> bool:
        return self._phase == layout.JOINING

    @property
    def is_in_backward(self) -> bool:
        return self._phase == layout.BACKWARD

    def block(self) -> bool:
        """From now on this thread waits for other ranks. False: it is not the loop's, or it was known already."""
        if self._blocked_since or get_ident() != self.thread:
            return False
        self._blocked_since = self._doubles[BLOCKED_SINCE] = time()
        return True

    def unblock(self) -> None:
        """It does no longer, if it did."""
        if self._blocked_since and get_ident() == self.thread:
            self._doubles[BLOCKED + self._phase] += time() - self._blocked_since
            self._blocked_since = self._doubles[BLOCKED_SINCE] = 0.0

    def _write_loop(self) -> None:
        self._beats = beats = self._beats + 1
        phase, epoch, step, samples = self._phase, self._epoch, self._step, self._samples
        _pack_loop(self.memory, _LOOP_AT, beats, phase, beats, epoch, step, samples, self._updates, self._since, beats)

    # ---- groups

    def group(self, name: str, ranks: Sequence[int], enqueued: int | None = None, completed: int | None = None) -> int:
        """The number by which collectives refer to this group. With many groups, the latest are kept."""
        number = self._groups.get(name)
        if number is None or self._in_slots[_slot(number)] != number:  # others have taken its place
            self._groups[name] = number = next(self._next_group)
            self._in_slots[_slot(number)] = number
        self._writes += 1
        # One more than the numbers: zero says that the flight recorder does not see this group.
        layout.GROUP_RECORD.pack_into(
            *(self.memory, (layout.GROUP + _slot(number) * layout.GROUP_WORDS) * WORD, self._writes, number),
            *(name.encode()[-layout.NAME_BYTES :], _shortened(ranks, layout.RANKS_BYTES).encode()),
            *(0 if enqueued is None else enqueued + 1, 0 if completed is None else completed + 1, self._writes),
        )
        return number

    # ---- collectives

    def begin(
        self, kind: int, number: int, size: int, is_running: bool = True, peer: int = NO_PEER, own_frames: int = 1
    ) -> int:
        """A collective that somebody asks for now. Returns what `start` and `end` want to know.

        ``own_frames``: so many at the top of the stack cannot be the user's; each costs time.
        """
        now = time()
        self._recorded = entry = self._recorded + 1
        place = self._here(own_frames + 1)
        at = _RING_AT + entry % RING_ENTRIES * _ENTRY_BYTES
        _pack_entry(
            self.memory, at, entry, kind, number, size, peer, place, now, now if is_running else 0.0, 0.0, entry
        )
        return entry

    def announce(self, log: Any, kind: int, number: int, size: int, own_frames: int) -> int:
        """The same for one that the C library runs next. It has the log (csrc/record.h), and
        notes the start and the end itself."""
        try:
            frame = _getframe(own_frames)  # as in `_here`
        except ValueError:
            frame = _getframe(1)
        place = self._known.get((id(frame.f_code), frame.f_lasti))
        self._recorded = log.record = entry = self._recorded + 1
        log.kind, log.number, log.size = kind, number, size
        log.place = self.places.find(frame) if place is None else place
        return entry

    def start(self, entry: int) -> None:
        """It was queued until now."""
        at = RING + entry % RING_ENTRIES * ENTRY_WORDS
        if self._words[at] == entry:  # later ones may have taken its place
            self._doubles[at + 7] = time()

    def end(self, entry: int, seconds: float, has_failed: bool = False) -> None:
        """``seconds``: that it took, with the waiting for other ranks."""
        at = RING + entry % RING_ENTRIES * ENTRY_WORDS
        if self._words[at] == entry:
            if has_failed:
                self._words[at + 1] |= 1
            self._doubles[at + 8] = time()
        if get_ident() == self.thread and not self._blocked_since:
            self._doubles[BLOCKED + self._phase] += seconds
        self._doubles[WAITED] += seconds

    def fly(self, index: int, seen: Flight | None) -> None:
        """One of the latest collectives of the flight recorder; None: there are no more."""
        at = layout.FLIGHT + index * ENTRY_WORDS
        if seen is None:
            self._words[at] = 0
            return
        self._writes += 1
        place = NO_PLACE if seen.place is None else self.places.slot_of(*seen.place)
        _pack_entry(
            *(self.memory, at * WORD, self._writes, seen.kind, seen.number, seen.size, seen.peer, place),
            *(seen.queued_at, seen.started_at, seen.ended_at, self._writes),
        )

    # ---- asking

    def is_asked(self) -> bool:
        """Whether somebody wants the page to be as new as can be."""
        return self._words[layout.ASKED] != self._words[layout.ANSWERED]

    def answer(self) -> None:
        self._words[layout.ANSWERED] = self._words[layout.ASKED]

    def are_stacks_asked(self) -> bool:
        """Whether somebody wants to know where all threads are."""
        return self._words[layout.STACKS_ASKED] != self._words[layout.STACKS_ANSWERED]

    def answer_stacks(self) -> None:
        self._words[layout.STACKS_ANSWERED] = self._words[layout.STACKS_ASKED]

    # ---- places in the user's code

    def _here(self, own_frames: int) -> int:
        """The number of the line that asks."""
        try:
            frame = _getframe(own_frames)
        except ValueError:  # there are fewer: a thread of C++ calls us
            frame = _getframe(1)
        place = self._known.get((id(frame.f_code), frame.f_lasti))
        return self.places.find(frame) if place is None else place


def _lengthen(fd: int, _: int, length: int) -> None:
    os.ftruncate(fd, length)


def _slot(group: int) -> int:
    """Nobody takes the first one's, which has all ranks."""
    return 0 if group == 0 else 1 + (group - 1) % (layout.GROUPS - 1)


def _shortened(ranks: Sequence[int], most: int) -> str:
    """0-3,6 for 0, 1, 2, 3, 6. If that is too long, the last ones are left out."""
    text = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs_of(ranks))
    return text if len(text) <= most else text[: text.rfind(",", 0, most + 1)]
