"""What crosses the connection between the conductor and a remote: a record a line.

Towards the conductor they stand among the lines of the ranks, on standard error; a login shell may have printed
something before them. They are known by their mark, a number that grows, and a seal, which needs the run's secret:
whatever else the ranks print, it is only ever a line of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Literal

from phalanx import messages
from phalanx.errors import ForeignData
from phalanx.launch.output.logs import LineSplitter
from phalanx.messages import Count, ExitCode, Message, Name, Port, Rank, Signal, Text

MARK = b"\x1ephalanx\x1e"

BEAT_SECONDS = 3.0
"""How often the conductor gives a sign of life."""
SILENCE = 15.0
"""Without one for so long a remote ends its ranks: there is nobody left who could."""


Topic = Literal["", "announce", "signal", "cause", "verdict"]
_numbers = itertools.count(1)


class Order(Message, frozen=True):
    """The first line to a remote: what to run there."""

    argv: tuple[str, ...]
    is_launch: bool
    """It is to be read as ``python -m phalanx.launch`` reads it."""
    directory: str
    environment: Mapping[str, str]
    nnodes: Count
    secret: Name
    node: Rank
    name: Name
    slots: Count | None
    """None: what --nproc-per-node says there."""
    by_ssh: bool
    resolve: Name | None
    """The name of the first host, where its address has to be found out."""


class Go(Message, frozen=True):
    """All hosts fit: start, and meet there if there are several."""

    master_addr: Name | None = None
    master_port: Port | None = None


class PassSignal(Message, frozen=True):
    signal: Signal


class Hello(Message, frozen=True):
    """A remote's answer: what its machine has."""

    python: Name
    torch: Name
    phalanx: Name
    nproc: Count
    port: Port | None
    """A free one, on the first host."""
    client: Name | None
    """The address of the conductor's machine, as ssh gives it, and of this one."""
    server: Name | None
    first: Name | None
    """The address of the first host."""


class Refused(Message, frozen=True):
    text: Text


class Ended(Message, frozen=True):
    exit_code: ExitCode


class Said(Message, frozen=True):
    """Lines for the console, which the conductor gets from every node."""

    text: Text
    topic: Topic
    """``announce``, ``signal`` (obeying one), ``cause`` and ``verdict`` (why the run ends), or none."""


FromRemote = Hello | Refused | Ended | Said


def line(order: Order | Go | PassSignal) -> bytes:
    """Towards a remote."""
    return messages.encode(order) + b"\n"


def marked(message: Hello | Refused | Ended | Said, node: str) -> bytes:
    """Towards the conductor, from the node of this name."""
    number = next(_numbers)
    return b"%s%d:%s\n" % (MARK, number, messages.seal(node, number, messages.encode(message)))


class Inbox:
    """The messages of one remote."""

    def __init__(self, node: str, hear: Callable[[Hello | Refused | Ended | Said], None]) -> None:
        self._node, self._hear = node, hear
        self._last = 0

    def take(self, data: bytes) -> bool:
        """Whether this is a message: sealed, and newer than all before. A program may print our mark."""
        text, _, sealed = data.rstrip().partition(b":")
        number = int(text) if text.isdigit() and len(text) < 18 else 0
        try:
            payload = messages.open_sealed(self._node, number, sealed, self._node)
            message = messages.decode(payload, FromRemote, self._node)
        except ForeignData:
            return False
        if number <= self._last:
            return False
        self._last = number
        self._hear(message)
        return True


class MessageFilter(LineSplitter):
    """Whole lines of a remote's output, without the messages among them, which are handed over.

    Until it is opened the lines are dropped: they are a login shell's greeting.
    """

    def __init__(self, inbox: Inbox) -> None:
        super().__init__(b"")
        self._inbox = inbox
        self.is_open = False

    def feed(self, data: bytes) -> bytes:
        return self._sift(super().feed(data))

    def finish(self) -> bytes:
        return self._sift(super().finish())

    def unfinished(self) -> bytes:
        text = super().unfinished()
        return b"" if MARK[:1] in text or not self.is_open else text

    def _sift(self, lines: bytes) -> bytes:
        if MARK not in lines:
            return lines if self.is_open else b""
        kept = b""
        for text in lines.splitlines(keepends=True):
            before, mark, message = text.partition(MARK)
            if not (mark and self._inbox.take(message)):
                before = text
            elif before:  # somebody else's line, that has no end yet
                before += b"\n"
            kept += before if self.is_open else b""
        return kept
