"""What crosses the connection between the conductor and a remote: a JSON object a line.

Towards the conductor they stand among the lines of the ranks, on standard error; a login shell may have printed
something before them. They are known by their mark and by the seal behind it, which needs the run's secret: whatever
else the ranks print, it is only ever a line of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from phalanx import secret
from phalanx.launch.output.logs import LineCutter

MARK = b"\x1ephalanx\x1e"

BEAT_SECONDS = 3.0
"""How often the conductor gives a sign of life."""
SILENCE = 15.0
"""Without one for so long a remote ends its ranks: there is nobody left who could."""


def line(**fields: Any) -> bytes:
    """Towards a remote."""
    return json.dumps(fields).encode() + b"\n"


def marked(**fields: Any) -> bytes:
    """Towards the conductor."""
    message = line(**fields)
    return MARK + secret.seal(message) + message


def spoken(lines: Sequence[str], topic: str, node: str | None) -> bytes:
    """What an agent says: to the person before the console, or to the conductor, which hears it from every node.

    Topics: ``announce``, ``signal`` (obeying one), ``cause`` and ``verdict`` (why the run ends), or none.
    """
    text = "\n".join(lines)
    if node is not None:
        return marked(say=text, topic=topic)
    return f"phalanx: {text}\n".encode(errors="replace")


class Sieve(LineCutter):
    """Whole lines of a remote's output, without the messages among them, which are handed over.

    Until it is opened the lines are dropped: they are a login shell's greeting.
    """

    def __init__(self, hear: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(b"")
        self._hear = hear
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
            if not (mark and self._understands(message)):
                before = text
            elif before:  # somebody else's line, that has no end yet
                before += b"\n"
            kept += before if self.is_open else b""
        return kept

    def _understands(self, message: bytes) -> bool:
        given, content = message[: secret.SEAL_CHARACTERS], message[secret.SEAL_CHARACTERS :]
        if not secret.is_sealed(content, given):  # a program that prints our mark
            return False
        self._hear(json.loads(content))
        return True
