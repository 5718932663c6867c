"""The writing side of a status page. Every write is a store into memory; the end of the process closes it.

A collective of shm may take less than ten microseconds, and each one calls this code. So there are no small functions
here whose call would cost more than their work.
"""

from __future__ import annotations

import itertools
import mmap
import os
from _thread import get_ident
from collections.abc import Callable, Sequence
from pathlib import Path
from sys import _getframe
from time import time
from typing import TYPE_CHECKING

from phalanx import run_files
from phalanx.status import layout
from phalanx.status.code_lines import CodeLines
from phalanx.status.layout import BLOCKED, BLOCKED_SINCE, ENTRY_WORDS, NO_PEER, NO_PLACE, RING, RING_ENTRIES, WORD
from phalanx.status.windows import WindowWriter
from phalanx.system import procfs

if TYPE_CHECKING:
    from phalanx.native.library import Log

_LOOP_AT, _RING_AT, _ENTRY_BYTES = layout.LOOP * WORD, RING * WORD, ENTRY_WORDS * WORD
_pack_loop, _pack_entry = layout.LOOP_RECORD.pack_into, layout.ENTRY_RECORD.pack_into


class StatusPage:
    """The page that a rank writes."""

    def __init__(self, path: Path, rank: int = 0, world_size: int = 1) -> None:
        fd = run_files.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            if hasattr(os, "posix_fallocate"):
                # A store into memory that a full disk cannot hold would kill us, so its blocks are allocated now.
                os.posix_fallocate(fd, 0, layout.PAGE_BYTES)
            else:
                os.ftruncate(fd, layout.PAGE_BYTES)
            self.memory = mmap.mmap(fd, layout.PAGE_BYTES)
        finally:
            os.close(fd)
        self.memory[:] = bytes(layout.PAGE_BYTES)  # of an earlier attempt, which a reader may have mapped
        whole = memoryview(self.memory)
        self._words, self._doubles = whole.cast("Q"), whole.cast("d")
        self.phase = layout.STARTED
        self._since = time()
        self._beats = self._epoch = self._step = self._samples = self.updates = 0
        self._groups: dict[str, int] = {}
        self._next_group = itertools.count()
        self._in_slots = [-1] * layout.GROUPS
        """The group in each slot."""
        self._recorded = self._writes = 0
        self.thread = get_ident()  # the thread that creates the page runs the loop
        self._blocked_since = 0.0
        """When it began to wait for other ranks outside of a collective that we record; 0: it does not."""
        self._windows = WindowWriter(self.memory)
        self.when_fetched: Callable[[float], None] | None = None
        """Is called with the seconds that the loop waited for data."""
        self.places = CodeLines(self.memory)
        self._known = self.places.known
        self.tick()
        for word, value in enumerate((layout.VERSION, os.getpid(), rank, world_size), 1):
            self._words[word] = value
        self._doubles[5], self._words[6] = self._since, procfs.start_ticks("self")
        self.memory[: len(layout.MAGIC)] = layout.MAGIC

    # ---- the loop

    def enter(self, phase: int) -> int:
        """Enters a phase, and returns the one before."""
        before, now = self.phase, time()
        self._doubles[layout.SECONDS + before] += now - self._since
        if before == layout.DATA and self.when_fetched is not None:
            self.when_fetched(now - self._since)
        self.phase, self._since = phase, now
        self.tick()
        return before

    def beat(self, phase: int, epoch: int, step: int, samples: int) -> None:
        """Enters a phase, and writes what px.track knows."""
        self._epoch, self._step, self._samples = epoch, step, samples
        self.enter(phase)

    def stepped(self, then: int) -> None:
        """Counts an optimizer's step, and enters the phase after it."""
        self.updates += 1
        self.enter(then)
        if self.updates == self._windows.due and not self._words[layout.DEVICE_STATE]:
            doubles = self._doubles
            own = tuple(doubles[layout.SECONDS + phase] - doubles[BLOCKED + phase] for phase in layout.OWN)
            self._windows.cut(own, self._since)

    def device_stepped(self, update: int, own: float, waited: float, data: float) -> None:
        """Writes the seconds so far by the device's clock, when the device has come to the end of a step."""
        self._words[layout.DEVICE_STEPS] += 1
        layout.DEVICE_TIMES.pack_into(self.memory, layout.DEVICE_SECONDS * WORD, own, waited, data)
        if update == self._windows.due:
            self._windows.cut((data, *(0.0,) * (len(layout.OWN) - 2), own), time())

    def device_is(self, state: int) -> None:
        """Writes that this rank's work is on an accelerator, not in its own phases, and what that does."""
        self._words[layout.DEVICE_STATE] = state

    def checkpointed(self, step: int, seconds: float = 0.0) -> None:
        """Writes the step of the checkpoint that was just saved or loaded, and how long the longest save has taken."""
        self._words[layout.CHECKPOINT_STEP] = step
        self._words[layout.LONGEST_SAVE] = max(self._words[layout.LONGEST_SAVE], int(seconds * 1000))

    def connecting(self, address: str) -> None:
        """Writes the address of the store that this rank connects to; empty: it is connected.

        An address that is too long for the page is not written.
        """
        at = layout.CONNECTING * WORD
        data = address.encode()
        if len(data) > layout.CONNECTING_BYTES:
            data = b""
        self.memory[at : at + layout.CONNECTING_BYTES] = data.ljust(layout.CONNECTING_BYTES, b"\0")

    @property
    def is_in_loop(self) -> bool:
        """True in the thread that runs the loop. Another one that saves or fetches is in no phase of the loop."""
        return self.thread == get_ident()

    def block(self) -> bool:
        """Notes that the loop waits for other ranks. False: this is not its thread, or that is known already."""
        if self._blocked_since or get_ident() != self.thread:
            return False
        self._blocked_since = self._doubles[BLOCKED_SINCE] = time()
        return True

    def unblock(self) -> None:
        """Notes that the loop waits no longer, if it did."""
        if self._blocked_since and get_ident() == self.thread:
            self._doubles[BLOCKED + self.phase] += time() - self._blocked_since
            self._blocked_since = self._doubles[BLOCKED_SINCE] = 0.0

    def tick(self) -> None:
        """Writes the loop: this rank makes progress."""
        self._beats = beats = self._beats + 1
        phase, epoch, step, samples = self.phase, self._epoch, self._step, self._samples
        _pack_loop(self.memory, _LOOP_AT, beats, phase, beats, epoch, step, samples, self.updates, self._since, beats)

    # ---- groups

    def group(self, name: str, ranks: Sequence[int], enqueued: int | None = None, completed: int | None = None) -> int:
        """Writes a group, and returns its number for collectives. With many groups, the latest are kept."""
        number = self._groups.get(name)
        if number is None or self._in_slots[_slot(number)] != number:  # another has taken its slot
            self._groups[name] = number = next(self._next_group)
            self._in_slots[_slot(number)] = number
        self._writes += 1
        # One more than the numbers: zero means that the flight recorder does not see this group.
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
        """Writes a collective that is called now, and returns its number for `start` and `end`.

        ``own_frames``: how many frames at the top of the stack cannot be the user's; looking at them costs time.
        """
        now = time()
        self._recorded = entry = self._recorded + 1
        place = self._here(own_frames + 1)
        at = _RING_AT + entry % RING_ENTRIES * _ENTRY_BYTES
        _pack_entry(
            self.memory, at, entry, kind, number, size, peer, place, now, now if is_running else 0.0, 0.0, entry
        )
        return entry

    def announce(self, log: Log, kind: int, number: int, size: int, own_frames: int) -> int:
        """Passes the same to the C library (csrc/record.h), which runs the collective and writes its start and end."""
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
        """Writes that a queued collective runs."""
        at = RING + entry % RING_ENTRIES * ENTRY_WORDS
        if self._words[at] == entry:  # a later one may have taken its slot
            self._doubles[at + 7] = time()

    def end(self, entry: int, seconds: float, has_failed: bool = False) -> None:
        """Writes that a collective has ended. ``seconds``: its duration, with the wait for other ranks."""
        at = RING + entry % RING_ENTRIES * ENTRY_WORDS
        if self._words[at] == entry:
            if has_failed:
                self._words[at + 1] |= 1
            self._doubles[at + 8] = time()
        if get_ident() == self.thread and not self._blocked_since:
            self._doubles[BLOCKED + self.phase] += seconds
        self._doubles[layout.WAITED] += seconds

    def write_flight(
        self,
        index: int,
        kind: int,
        number: int,
        size: int,
        started: float,
        ended: float,
        line: tuple[str, int, str] | None,
    ) -> None:
        """Writes one of the latest collectives of the flight recorder. ``line``: file, line and function."""
        self._writes += 1
        place = NO_PLACE if line is None else self.places.slot_of(*line)
        at = (layout.FLIGHT + index * ENTRY_WORDS) * WORD
        _pack_entry(
            self.memory, at, self._writes, kind, number, size, NO_PEER, place, started, started, ended, self._writes
        )

    def clear_flights(self, first: int = 0) -> None:
        """Removes the collectives of the flight recorder, from this index on."""
        for index in range(first, layout.FLIGHT_ENTRIES):
            self._words[layout.FLIGHT + index * ENTRY_WORDS] = 0

    # ---- requests

    def is_asked(self, word: int) -> bool:
        """True if a reader waits for an answer. ``word``: of the request, which the answer follows."""
        return self._words[word] != self._words[word + 1]

    def answer(self, word: int) -> None:
        self._words[word + 1] = self._words[word]

    # ---- the user's code

    def _here(self, own_frames: int) -> int:
        """Returns the number of the user's line that calls."""
        try:
            frame = _getframe(own_frames)
        except ValueError:  # there are fewer: a thread of C++ calls us
            frame = _getframe(1)
        place = self._known.get((id(frame.f_code), frame.f_lasti))
        return self.places.find(frame) if place is None else place


def _slot(group: int) -> int:
    """Returns where a group is written. The first one has all ranks, and keeps its slot."""
    return 0 if group == 0 else 1 + (group - 1) % (layout.GROUPS - 1)


def _shortened(ranks: Sequence[int], most: int) -> str:
    """Returns 0-3,6 for 0, 1, 2, 3, 6. If that is too long, the last ones are left out."""
    text = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in layout.runs_of(ranks))
    return text if len(text) <= most else text[: text.rfind(",", 0, most + 1)]
