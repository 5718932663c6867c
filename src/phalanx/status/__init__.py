"""The hallway: a page of memory in which each rank says what it is doing, readable from outside, even after its death.

``rank-N.status`` in the run directory, mapped by the rank. `layout` says what stands where, `page` writes, `reading`
reads. `own` is the page of this process, if ``phalanx run`` started it.
"""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.status.layout import PHASES
from phalanx.status.page import StatusPage
from phalanx.status.reading import Collective, Group, Place, Status, ask, from_fields, read, status_path, to_fields

__all__ = [
    "PHASES",
    "Collective",
    "Group",
    "Place",
    "Status",
    "StatusPage",
    "ask",
    "begin",
    "from_fields",
    "own",
    "read",
    "status_path",
    "to_fields",
]

_own: StatusPage | None = None


def begin(directory: Path, rank: int, world_size: int) -> None:
    """From now on this process has a page. A disk without room for it is no reason not to train."""
    global _own
    try:
        _own = StatusPage(status_path(directory, rank), rank, world_size)
    except OSError:
        _own = None


def own() -> StatusPage | None:
    """None outside of ``phalanx run``, and in processes that a rank has started."""
    return _own


def _forget() -> None:
    global _own
    _own = None


os.register_at_fork(after_in_child=_forget)
