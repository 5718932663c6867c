"""phalanx: data-parallel training with PyTorch. ``import phalanx as px``.

The names below are loaded when they are first used: importing phalanx imports no torch and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.comm.order import barrier, main_only, print, rank_zero_first
    from phalanx.errors import PhalanxError
    from phalanx.launch.spawn import spawn
    from phalanx.world import World, init

_HOMES = {
    "PhalanxError": "phalanx.errors",
    "World": "phalanx.world",
    "barrier": "phalanx.comm.order",
    "init": "phalanx.world",
    "main_only": "phalanx.comm.order",
    "print": "phalanx.comm.order",
    "rank_zero_first": "phalanx.comm.order",
    "spawn": "phalanx.launch.spawn",
}

__all__ = ["PhalanxError", "World", "barrier", "init", "main_only", "print", "rank_zero_first", "spawn"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "testing"]
