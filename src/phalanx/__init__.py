"""phalanx: data-parallel training with PyTorch. ``import phalanx as px``.

The names below are loaded when they are first used: importing phalanx imports no torch and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.checkpoint.checkpointer import Checkpointer
    from phalanx.checkpoint.state import State
    from phalanx.comm.order import barrier, main_only, print, rank_zero_first
    from phalanx.data.iterable import shard
    from phalanx.data.sampler import ShardSampler
    from phalanx.errors import PhalanxError
    from phalanx.launch.spawn import spawn
    from phalanx.parallel.wrap import data_parallel
    from phalanx.preemption.stop import stop
    from phalanx.train.accumulate import accumulate
    from phalanx.train.metrics import Max, Mean, Min, Sum, compute_metrics
    from phalanx.train.precision import autocast
    from phalanx.train.progress import log
    from phalanx.train.track import track
    from phalanx.world import World, init

_HOMES = {
    "checkpoint.checkpointer": ("Checkpointer",),
    "checkpoint.state": ("State",),
    "comm.order": ("barrier", "main_only", "print", "rank_zero_first"),
    "data.iterable": ("shard",),
    "data.sampler": ("ShardSampler",),
    "errors": ("PhalanxError",),
    "launch.spawn": ("spawn",),
    "parallel.wrap": ("data_parallel",),
    "preemption.stop": ("stop",),
    "train.accumulate": ("accumulate",),
    "train.metrics": ("Max", "Mean", "Min", "Sum", "compute_metrics"),
    "train.precision": ("autocast",),
    "train.progress": ("log",),
    "train.track": ("track",),
    "world": ("World", "init"),
}
"""The module of each name."""

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
    "stop",
    "track",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"phalanx.{module}"), name)
            return value
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "testing"]
