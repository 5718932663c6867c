"""Windows of ten steps: the rank's own work in each phase, without its waits for other ranks.

On an accelerator they are by its own clock. Every rank cuts its windows at the same steps, so that those of different
ranks can be compared, wherever and whenever they are read. Where steps are short, a few are kept per second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

from phalanx import run_files
from phalanx.status import layout
from phalanx.status.layout import WINDOW, WINDOW_RECORD, WINDOW_STEPS, WINDOW_WORDS, WINDOWS, WORD

_SOONEST, _LATEST = 0.1, 0.4
"""Seconds from one window to the next."""
_MOST = WINDOW_STEPS << 16
_BYTES = WINDOWS * WINDOW_WORDS * WORD


class WindowWriter:
    """Writes the windows of this rank into its page."""

    def __init__(self, page: mmap) -> None:
        self._page = page
        self._written = 0
        self._every = WINDOW_STEPS
        self._begun: tuple[float, ...] | None = None
        self._ended_at = 0.0
        self.due = WINDOW_STEPS
        """The step at which to call `cut`. The steps before the first window are warm-up."""

    def cut(self, own: tuple[float, ...], now: float) -> None:
        """Ends a window, begins one, or both. ``own``: seconds of own work in each phase so far."""
        if self._begun is not None:
            self._write(own)
            self._adapt(now)
        behind = self.due % self._every
        self._begun = None if behind else own
        self.due += self._every - behind if behind else WINDOW_STEPS

    def _write(self, own: tuple[float, ...]) -> None:
        assert self._begun is not None
        spent = (after - before for after, before in zip(own, self._begun, strict=True))
        at = (WINDOW + self._written % WINDOWS * WINDOW_WORDS) * WORD
        self._written += 1
        WINDOW_RECORD.pack_into(self._page, at, self._written, self.due, *spent, self._written)

    def _adapt(self, now: float) -> None:
        # By factors of two: ranks whose intervals differ by one factor have every second window in common.
        if now - self._ended_at < _SOONEST and self._every < _MOST:
            self._every *= 2
        elif now - self._ended_at > _LATEST and self._every > WINDOW_STEPS:
            self._every //= 2
        self._ended_at = now


class Window(NamedTuple):
    """Ten steps of one rank."""

    updates: int
    """The number of the last step."""
    seconds: Mapping[str, float]
    """Seconds of own work in each phase."""

    @property
    def own(self) -> float:
        """Seconds of own work in a step."""
        return sum(self.seconds.values()) / WINDOW_STEPS


def read_windows(path: Path) -> tuple[Window, ...]:
    """Returns the windows that a page still holds, oldest first."""
    try:
        fd = run_files.open_to_read(path)
    except OSError:
        return ()
    try:
        page, again = (os.pread(fd, _BYTES, WINDOW * WORD) for _ in range(2))
    finally:
        os.close(fd)
    found = []
    for start in range(0, min(len(page), len(again)) - WINDOW_RECORD.size + 1, WINDOW_RECORD.size):
        number, updates, *spent, end = WINDOW_RECORD.unpack_from(page, start)
        if number == end != 0 and page[start : start + WINDOW_RECORD.size] == again[start : start + WINDOW_RECORD.size]:
            seconds = {layout.PHASES[phase]: max(0.0, of) for phase, of in zip(layout.OWN, spent, strict=True)}
            found.append((number, Window(updates, seconds)))
    return tuple(window for _, window in sorted(found, key=lambda pair: pair[0]))
