"""What each rank of `phalanx bench track` runs.

    track_rank.py DIRECTORY

It is copied to a directory of its own and run there; never imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px
from phalanx.bench.torch_groups import agree
from phalanx.bench.turns import Contender, Turns


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    with px.init() as world:
        turns = Turns(px.barrier, agree, order["seconds"] / 2)
        for measure, work in (("work", order["milliseconds"] / 1e3), ("nothing", 0.0)):
            contenders = [Contender(name, [_Epoch(name, order["steps"], work)]) for name in ("bare", "tracked")]
            turns.measure(measure, 0, contenders)
        turns.write(directory, world.rank)


class _Epoch:
    """A pass over a loader with a sampler, as training makes it."""

    def __init__(self, name: str, steps: int, work: float) -> None:
        data = TensorDataset(torch.zeros(steps))
        self._loader = DataLoader(data, batch_size=1, sampler=px.ShardSampler(data, num_replicas=1, rank=0))
        self._is_tracked, self._work = name == "tracked", work
        self._loss = torch.tensor(0.5)
        self._epoch = 0

    def __call__(self) -> None:
        self._epoch += 1
        batches: Iterable[object] = self._loader
        if self._is_tracked:
            batches = px.track(self._loader, epoch=self._epoch)
        else:
            self._loader.sampler.set_epoch(self._epoch)  # type: ignore[attr-defined]
        for _ in batches:
            until = time.perf_counter() + self._work
            while time.perf_counter() < until:
                pass
            if self._is_tracked:
                px.log(loss=self._loss)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
