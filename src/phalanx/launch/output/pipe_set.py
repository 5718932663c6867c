"""Many pipes, one loop: which of them are read now, and which have to wait for the console."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable

from phalanx.launch.output.logs import OutputPipe


class PipeSet:
    """The pumps of one loop. ``wake`` makes it turn, from whichever thread."""

    def __init__(self, selector: selectors.BaseSelector, wake: Callable[[], None]) -> None:
        self._selector, self._wake = selector, wake
        self._resumable: list[OutputPipe] = []

    def add(self, pipe: OutputPipe) -> None:
        """It is read from now on; a second time does no harm, nor after its end."""
        if not pipe.ended and pipe.fileno() not in self._selector.get_map():
            self._selector.register(pipe, selectors.EVENT_READ, lambda: self._move(pipe))

    def resume(self, pipe: OutputPipe) -> None:
        """Called on the console's thread: this pump may be read again."""
        self._resumable.append(pipe)
        self._wake()

    def turn(self, pipes: Iterable[OutputPipe]) -> None:
        """What is due in every turn of the loop."""
        while self._resumable:
            self.add(self._resumable.pop())
        now = time.monotonic()
        for pipe in pipes:
            pipe.tick(now)

    def _move(self, pipe: OutputPipe) -> None:
        if not pipe.read() or pipe.paused:
            self._selector.unregister(pipe)
