"""A page of memory in which each rank writes what it is doing. It can be read from outside, even after its death.

``rank-N.status`` in the run directory, mapped by the rank. `layout` describes it, `page` writes it, `reading` reads it,
and `windows` does both for the pace of the last steps. `own_page` is the page of this process. A rank imports only the
standard library before its script, so the writing side imports neither `reading` nor msgspec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.status.reading import Status


def read(path: Path) -> Status | None:
    """Reads a page. None if there is none, or if it is not ours."""
    from phalanx.status import reading

    return reading.read(path)
