"""What `px.track` and `px.log` add to a training step: a loop with them beside the same loop without.

The work of a step is waiting for the clock, which is the same for both, so that what is left is what they cost. Both
loops take turns in the same processes; a turn is a barrier and an epoch. With px.track every step is timed, counted
and reported to the sampler, the heartbeat is written, px.log is called, and once a second the ranks exchange where
they are.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from common import main, read_order
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px
from phalanx.bench.commands import Settings, Step, job
from phalanx.bench.common import Benchmark, Flag, Row, compare, counts, positive, seconds
from phalanx.bench.ranks import Contender, Turns, agree

BARE, TRACKED = "bare", "tracked"


def plan(settings: Settings) -> Iterator[Step]:
    order = {name: getattr(settings, name) for name in ("milliseconds", "steps", "seconds")}
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            yield job("track", (__file__, "--rank"), ranks, order, (repeat, settings))


def tables(rows: Sequence[Row], settings: Settings) -> list[str]:
    title = f"An epoch of {settings.steps} steps of {settings.milliseconds:g} ms of work, and of none"
    return [compare(title, rows, (BARE, TRACKED), costs=[(TRACKED, BARE)])]


def rank(directory: Path) -> None:
    order = read_order(directory)
    with px.init() as world:
        turns = Turns(px.barrier, agree, order["seconds"] / 2)
        for measure, work in (("work", order["milliseconds"] / 1e3), ("nothing", 0.0)):
            epochs = {name: new_epoch(name, order["steps"], work) for name in (BARE, TRACKED)}
            turns.measure(measure, 0, [Contender(name, [epoch]) for name, epoch in epochs.items()])
        turns.write(directory, world.rank)


def new_epoch(name: str, steps: int, work: float) -> Callable[[], None]:
    """A pass over a loader with a sampler, as training makes it."""
    data = TensorDataset(torch.zeros(steps))
    sampler = px.ShardSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, batch_size=1, sampler=sampler)
    loss, numbers = torch.tensor(0.5), itertools.count(1)

    def run() -> None:
        epoch = next(numbers)
        batches: Iterable[object] = loader
        if name == TRACKED:
            batches = px.track(loader, epoch=epoch)
        else:
            sampler.set_epoch(epoch)
        for _ in batches:
            until = time.perf_counter() + work
            while time.perf_counter() < until:
                pass
            if name == TRACKED:
                px.log(loss=loss)

    return run


FLAGS = (
    Flag("--ranks", "A,B", counts, "1,2"),
    Flag("--milliseconds", "MS", seconds, 5.0, "of a step's work"),
    Flag("--steps", "N", positive, 100, "in an epoch"),
    Flag("--seconds", "S", seconds, 8.0, "for one job, about"),
)
BENCHMARK = Benchmark("track", __doc__, plan, tables, FLAGS)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, rank))
