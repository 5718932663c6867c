"""What one process of `phalanx bench sampler` runs: one sampler, at one length, measured once.

    sampler_probe.py DIRECTORY MEASURE CONTENDER LENGTH WORLD

It is copied to a directory of its own and run there; only its tests import it.
"""

from __future__ import annotations

import collections
import importlib
import itertools
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_HOMES = {
    "ShardSampler": "phalanx.data",
    "DistributedSampler": "torch.utils.data",
    "StatefulDistributedSampler": "torchdata.stateful_dataloader.sampler",
}
_WALKED = 100_000
"""Indices that are taken while memory is measured: enough for blocks to have grown to their full size."""

Make = Callable[[], Any]


def main(directory: Path, measure: str, contender: str, length: int, world: int) -> None:
    kind = getattr(importlib.import_module(_HOMES[contender]), contender)

    def make() -> Any:
        return kind(range(length), num_replicas=world, rank=0)

    notes = _first(make, traced=contender == "ShardSampler") if measure == "first" else _epoch(make)
    (directory / "notes.json").write_text(json.dumps(notes))


def _first(make: Make, traced: bool) -> dict[str, float]:
    """Seconds to the first index, from the constructor on, and bytes of memory that it and the following ones take."""
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten: importing torch has had a higher one
    started = time.perf_counter()
    indices = iter(make())
    next(indices)
    notes = {"first": time.perf_counter() - started}
    _exhaust(itertools.islice(indices, _WALKED))
    notes["memory"] = max(0, _memory("VmHWM") - before)
    if traced:  # only here: of millions of numbers each would be traced, which takes more memory than they do
        del indices
        tracemalloc.start()
        _exhaust(itertools.islice(iter(make()), _WALKED))
        notes["traced"] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return notes


def _epoch(make: Make) -> dict[str, float]:
    """Indices a second over the rank's whole epoch, from the constructor on."""
    started = time.perf_counter()
    sampler = make()
    _exhaust(iter(sampler))
    return {"epoch": len(sampler) / (time.perf_counter() - started)}


def _exhaust(indices: Iterator[int]) -> None:
    """At the speed of C, so that it is the sampler that is measured."""
    collections.deque(indices, maxlen=0)


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
