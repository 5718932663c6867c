"""The lines of the agent itself, among those of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.launch.output.console import Console

if TYPE_CHECKING:
    from phalanx.launch.output.wire_protocol import Topic


class AgentLines:
    """Prints lines of the agent, or of the conductor."""

    def __init__(self, console: Console, node: str | None = None, shares_console: bool = False) -> None:
        """``node``: the name of this node if a conductor prints for it; ``shares_console``: with another agent."""
        self._console, self._node, self._shares_console = console, node, shares_console
        self._said: set[str] = set()

    def drained(self) -> None:
        """The console has written it; nothing waits for that."""

    def say(self, lines: Sequence[str], topic: Topic = "") -> None:
        """Prints the lines here, or has the conductor print them. ``topic``: see `wire_protocol.Lines`."""
        if self._shares_console and topic in ("announce", "verdict", "signal"):
            return  # the other agent prints the same
        text = "\n".join(lines)
        if self._node is None:
            data = f"phalanx: {text}\n".encode(errors="replace")
        else:
            from phalanx.launch.output.wire_protocol import Lines, marked  # not needed without a conductor

            data = marked(Lines(text, topic), self._node)
        self._console.put(self, self._console.err, data, on_a_new_line=True)

    def say_one(self, text: str) -> None:
        self.say([text])

    def say_once(self, text: str) -> bool:
        """Returns whether it was new."""
        is_new = text not in self._said
        if is_new:
            self._said.add(text)
            self.say_one(text)
        return is_new

    def show(self, text: str) -> bool:
        """Shows a line on a terminal until the next one is printed. Returns False without a terminal."""
        is_terminal = self._console.is_terminal[self._console.err]
        if is_terminal:
            self._console.show_live(self._console.err, f"phalanx: {text}".encode())
        return is_terminal

    def let_ranks_finish(self, give_up: Callable[[], bool]) -> None:
        """Waits until the lines of the ranks are printed, as long as somebody reads them."""
        while not self._console.flush(0.2) and not give_up():
            pass
