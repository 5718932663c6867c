"""The messages between the conductor and the agent of a host: one record per line.

Towards the conductor they stand among the lines of the ranks, on standard error; a login shell may have printed
something before them. They are recognised by their mark, a growing number, and a seal, which needs the run's secret,
so nothing that a rank prints can be taken for one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Literal

from phalanx import messages
from phalanx.errors import ForeignData
from phalanx.launch.output.line_splitter import LineSplitter
from phalanx.messages import Count, ExitCode, Message, Name, Port, Rank, Signal, Text

MARK = b"\x1ephalanx\x1e"

BEAT_SECONDS = 3.0
"""Seconds between two heartbeats of the conductor."""
SILENCE = 15.0
"""Seconds without one after which a host ends its ranks: the conductor is lost."""

Topic = Literal["", "announce", "signal", "cause", "verdict"]
_numbers = itertools.count(1)


class Order(Message, frozen=True):
    """The first line to a host: what to run there."""

    argv: tuple[str, ...]
    is_launch: bool
    """The arguments are those of ``python -m phalanx.launch``."""
    directory: str
    environment: Mapping[str, str]
    nnodes: Count
    secret: Name
    node: Rank
    name: Name
    slots: Count | None
    """The number of its ranks; None for --nproc-per-node."""
    by_ssh: bool
    resolve: Name | None
    """The name of the first host, if this host has to look up its address."""


class Go(Message, frozen=True):
    """All hosts fit together: start, with this master if there are several."""

    master_addr: Name | None = None
    master_port: Port | None = None


class PassSignal(Message, frozen=True):
    signal: Signal


class Hello(Message, frozen=True):
    """A host's answer to the order: what it has."""

    python: Name
    torch: Name
    phalanx: Name
    nproc: Count
    port: Port | None
    """A free one, on the first host."""
    client: Name | None
    """The address of the conductor, as ssh on this host reports it."""
    server: Name | None
    """The address of this host, as ssh reports it."""
    first: Name | None
    """The address of the first host."""


class Refused(Message, frozen=True):
    text: Text


class Ended(Message, frozen=True):
    exit_code: ExitCode


class Lines(Message, frozen=True):
    """Lines for the console, which the conductor gets from every node."""

    text: Text
    topic: Topic
    """``announce``, ``signal`` (obeying one), ``cause`` and ``verdict`` (why the run ends), or none."""


FromHost = Hello | Refused | Ended | Lines


def marked(message: FromHost, node: str) -> bytes:
    """Encodes a message to the conductor, from the node of this name."""
    number = next(_numbers)
    return b"%s%d:%s\n" % (MARK, number, messages.seal(node, number, messages.encode(message)))


class Inbox:
    """Checks and decodes the messages of one host."""

    def __init__(self, node: str, receive: Callable[[FromHost], None]) -> None:
        self._node, self._receive = node, receive
        self._last = 0

    def take(self, data: bytes) -> bool:
        """Returns True for a message: sealed, and newer than all before. A program may print our mark, too."""
        text, _, sealed = data.rstrip().partition(b":")
        number = int(text) if text.isdigit() and len(text) < 18 else 0
        try:
            payload = messages.open_sealed(self._node, number, sealed, self._node)
            message = messages.decode(payload, FromHost, self._node)
        except ForeignData:
            return False
        if number <= self._last:
            return False
        self._last = number
        self._receive(message)
        return True


class MessageFilter(LineSplitter):
    """Splits the output of a host into lines, and gives the messages among them to the inbox.

    Until it is open the lines are dropped: they are a login shell's greeting.
    """

    def __init__(self, inbox: Inbox) -> None:
        super().__init__(b"")
        self._inbox = inbox
        self.is_open = False

    def feed(self, data: bytes) -> bytes:
        return self._filter(super().feed(data))

    def finish(self) -> bytes:
        return self._filter(super().finish())

    def unfinished(self) -> bytes:
        text = super().unfinished()
        return b"" if MARK[:1] in text or not self.is_open else text

    def _filter(self, lines: bytes) -> bytes:
        if MARK not in lines:
            return lines if self.is_open else b""
        kept = b""
        for text in lines.splitlines(keepends=True):
            before, mark, message = text.partition(MARK)
            if not (mark and self._inbox.take(message)):
                before = text
            elif before:  # another program's line, which has not ended yet
                before += b"\n"
            kept += before if self.is_open else b""
        return kept
