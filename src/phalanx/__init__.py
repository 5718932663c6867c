"""phalanx: data-parallel training with PyTorch. ``import phalanx as px``.

The names below are loaded when they are first used: importing phalanx imports no torch and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.checkpoint.checkpointer import Checkpointer
    from phalanx.checkpoint.state import State
    from phalanx.comm.order import barrier, main_only, print, rank_zero_first
    from phalanx.data.iterable import shard
    from phalanx.data.sampler import ShardSampler
    from phalanx.errors import PhalanxError
    from phalanx.launch.spawn import spawn
    from phalanx.parallel.wrap import data_parallel
    from phalanx.train.accumulate import accumulate
    from phalanx.train.metrics import Max, Mean, Min, Sum, compute_metrics
    from phalanx.train.precision import autocast
    from phalanx.train.progress import log
    from phalanx.train.track import track
    from phalanx.world import World, init

_HOMES = {
    "Checkpointer": "phalanx.checkpoint.checkpointer",
    "Max": "phalanx.train.metrics",
    "Mean": "phalanx.train.metrics",
    "Min": "phalanx.train.metrics",
    "PhalanxError": "phalanx.errors",
    "ShardSampler": "phalanx.data.sampler",
    "State": "phalanx.checkpoint.state",
    "Sum": "phalanx.train.metrics",
    "World": "phalanx.world",
    "accumulate": "phalanx.train.accumulate",
    "autocast": "phalanx.train.precision",
    "barrier": "phalanx.comm.order",
    "compute_metrics": "phalanx.train.metrics",
    "data_parallel": "phalanx.parallel.wrap",
    "init": "phalanx.world",
    "log": "phalanx.train.progress",
    "main_only": "phalanx.comm.order",
    "print": "phalanx.comm.order",
    "rank_zero_first": "phalanx.comm.order",
    "shard": "phalanx.data.iterable",
    "spawn": "phalanx.launch.spawn",
    "track": "phalanx.train.track",
}

__all__ = [
    "Checkpointer",
    "Max",
    "Mean",
    "Min",
    "PhalanxError",
    "ShardSampler",
    "State",
    "Sum",
    "World",
    "accumulate",
    "autocast",
    "barrier",
    "compute_metrics",
    "data_parallel",
    "init",
    "log",
    "main_only",
    "print",
    "rank_zero_first",
    "shard",
    "spawn",
    "track",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "testing"]
