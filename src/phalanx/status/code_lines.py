"""Lines of the user's code, each written into a status page once and referred to by a number."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Sequence
from types import CodeType, FrameType

from phalanx.source_lines import PACKAGE_ROOT, STANDARD, program_package
from phalanx.status import layout
from phalanx.status.layout import NO_PLACE, WORD

_MOST_CODES = 10_000


class CodeLines:
    """The lines of one page. Any thread may ask for one; a line that is known is found without a lock."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.known: dict[tuple[int, int], int] = {}
        """The number of a line, by the id of its code object and the instruction in it."""
        self._memory, self._words = memory, memoryview(memory).cast("Q")
        self._slots: dict[tuple[str, int, str], int] = {}
        self._next_slot = itertools.count()
        self._sides: dict[int, int] = {}
        self._seen: list[CodeType] = []  # kept, so that no other code gets their ids
        self._never = (PACKAGE_ROOT, "<frozen", "<string>")
        # Reentrant: a signal handler may call a collective while its own thread holds the lock.
        self._lock = threading.RLock()

    def never_users(self, directories: Sequence[str]) -> None:
        """Declares that code below these directories is not the user's."""
        with self._lock:
            self._never += tuple(directories)
            self._sides.clear()
            self.known.clear()

    def side(self, file: str) -> int:
        """Returns 0 for code that is not the user's, 1 for a library, which may call for the user, 2 for the user's."""
        if file.startswith(self._never):
            return 0
        if "site-packages" in file or "dist-packages" in file:  # these may be below the standard library's
            program = program_package()
            return 2 if program and file.startswith(program) else 1
        return 0 if file.startswith(STANDARD) else 2

    def find(self, frame: FrameType | None) -> int:
        """Returns the number of the innermost line that is the user's; a library's if there is none."""
        sides, library = self._sides, None
        while frame is not None:
            code = frame.f_code
            side = sides.get(id(code))  # by id: the hash of a code object takes as long as everything else here
            if side is None:
                side = self._remember(code)
            if side == 2:
                # By instruction: the line takes long to find in a long function.
                found = self.known.get((id(code), frame.f_lasti))
                return found if found is not None else self._new(code, frame)
            if side == 1 and library is None:
                library = frame
            frame = frame.f_back
        return NO_PLACE if library is None else self._new(library.f_code, library)

    def slot_of(self, file: str, line: int, function: str) -> int:
        """Returns the number of a line, and writes it if it is new. With many lines, the latest are kept."""
        place = file, line, function
        slot = self._slots.get(place)
        if slot is not None:
            return slot
        with self._lock:
            if place in self._slots:  # by another thread meanwhile
                return self._slots[place]
            slot = next(self._next_slot) % layout.PLACES
            for known in (self._slots, self.known):
                for key in [key for key, taken in known.items() if taken == slot]:
                    del known[key]  # type: ignore[arg-type]
            self._slots[place] = slot
            text = f"{line}\0{function[-60:]}\0{file[-150:]}".encode(errors="replace")
            text = text[: (layout.PLACE_WORDS - 1) * WORD]
            at = layout.PLACE + slot * layout.PLACE_WORDS
            start = (at + 1) * WORD
            self._memory[start : start + len(text)] = text
            self._words[at] = len(text)
        return slot

    def _remember(self, code: CodeType) -> int:
        with self._lock:
            if len(self._seen) >= _MOST_CODES:  # a script that compiles new code all the time
                for each in (self._sides, self.known, self._seen):
                    each.clear()
            self._seen.append(code)
            self._sides[id(code)] = side = self.side(code.co_filename)
        return side

    def _new(self, code: CodeType, frame: FrameType) -> int:
        with self._lock:
            slot = self.slot_of(code.co_filename, frame.f_lineno, getattr(code, "co_qualname", code.co_name))
            self.known[id(code), frame.f_lasti] = slot
        return slot
