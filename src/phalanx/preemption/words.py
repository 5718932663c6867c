"""The words of a rank's status page by which it and its agent agree on the step at which all ranks stop.

The agent proposes a step; a rank votes at its next stop point, which is the end of an optimizer's step. A rank that has
voted yes holds at the first stop point at or after the proposed one, until the agent commits or proposes another. Ranks
wait for their agent alone, never for each other. The clock of a proposal is the number of collectives of the world at a
stop point, or the number of stop points where ranks train without such collectives.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from phalanx import run_files
from phalanx.status import layout

EPOCH, STEP, CLOCK, SIGNAL, COMMITTED, RELEASED = (layout.STOP + word for word in range(6))
"""Written by the agent: the number of the proposal, last of all; the value of the clock that it proposes; which clock;
the signal, or 0; the last proposal that is committed; the signals, as bits, that are delivered
at once."""
REASON, REASON_BYTES = layout.STOP + 6, 80
"""Written by the agent: why a script has asked to stop."""
CLOCKS = (layout.STOP + 16, layout.STOP + 17)
"""Written by the rank at each stop point: the world's collectives, and its stop points."""
STANDS_STILL, VOTE, HANDLES, DELIVERED, INTERVAL = (layout.STOP + word for word in range(18, 23))
"""Written by the rank: whether the world's collectives stood still over two stop points; twice the number of the
proposal, plus one for yes; the signals that its script handles, as bits; the last proposal at which it has stopped;
nanoseconds between the last two stop points."""
COLLECTIVES, STOP_POINTS = range(2)
ASKS, TRAINS = 0, 63
"""The bits of HANDLES for a script that asks px.stop, and that has an optimizer; the others are numbers of signals."""


class RankWords:
    """The agent's view of these words in the page of one rank."""

    def __init__(self, run_directory: Path, rank: int) -> None:
        """Raises OSError or ValueError where the rank has no page."""
        fd = run_files.open_file(layout.status_path(run_directory, rank), os.O_RDWR)
        try:
            self._memory = mmap.mmap(fd, layout.PAGE_BYTES)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("Q")

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value

    def stops_by(self, number: int) -> bool:
        """Whether the script handles this signal itself, or asks px.stop."""
        return bool(self._words[HANDLES] & (1 << number | 1 << ASKS))

    @property
    def trains(self) -> bool:
        """Whether the rank has passed a stop point, or has an optimizer that will bring it to one."""
        return bool(self._words[CLOCKS[STOP_POINTS]] or self._words[HANDLES] >> TRAINS)

    def write_reason(self, reason: str) -> None:
        at = REASON * layout.WORD
        self._memory[at : at + REASON_BYTES] = reason.encode(errors="replace")[:REASON_BYTES].ljust(REASON_BYTES, b"\0")

    def close(self) -> None:
        self._words.release()
        self._memory.close()
