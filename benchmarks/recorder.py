"""What the recorder adds to a collective and to a training step: the same work with a status page and without one.

Both take turns in the same processes; a turn is a barrier and some calls of all_reduce, or a training step of an MLP
with DDP. Through shm the page is written by the ranks as they go; through gloo a thread of each rank reads torch's
flight recorder, which is always on.
"""

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import Order, main, mlp, mlp_batch, run_rank, stepper
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.commands import Settings, Step, job
from phalanx.bench.common import Benchmark, Flag, Row, compare, counts, positive, seconds
from phalanx.bench.ranks import Contender, Turns
from phalanx.status import own_page

WITHOUT, WITH = "without", "with"
Calls = Sequence[Callable[[], object]]


def plan(settings: Settings) -> Iterator[Step]:
    order = {name: getattr(settings, name) for name in ("calls", "widths", "seconds")}
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            yield job("recorder", (__file__, "--rank"), ranks, order, (repeat, settings))


def tables(rows: Sequence[Row], _: Settings) -> list[str]:
    return [compare("With and without the recorder", rows, (WITHOUT, WITH), costs=[(WITH, WITHOUT)], unit="µs")]


def measure(turns: Turns, groups: dict[str, Any], order: Order) -> None:
    assert own_page.current() is not None, "phalanx run has made it"
    # Many short ones: what is looked for is less than what the machine's speed changes by from second to second.
    turns.most_rounds = 2000

    def record(on: bool) -> None:
        own_page.switch(on)
        groups["shm"].record(on)

    work = {"all_reduce of 4 B": functools.partial(_all_reduces, order["calls"])}
    work |= {f"DDP step, width {width}": functools.partial(_step, width) for width in order["widths"]}
    for backend in ("shm", "gloo"):
        for what, make in work.items():
            # One model for both: two that differ in nothing but their addresses may differ by a third in speed.
            calls = make(groups[backend])
            contenders = [(name, functools.partial(record, name == WITH)) for name in (WITHOUT, WITH)]
            turns.measure(f"{what}, {backend}", 0, [Contender(name, calls, prepare) for name, prepare in contenders])
            record(True)
            del calls, contenders
            gc.collect()


def _all_reduces(calls: int, group: Any) -> Calls:
    tensor = torch.zeros(1)

    # From this file, as from a script: from inside of phalanx it takes longer to find the caller.
    def call() -> None:
        dist.all_reduce(tensor, group=group)

    return [call] * calls


def _step(width: int, group: Any) -> Calls:
    torch.manual_seed(0)
    return [stepper(DistributedDataParallel(mlp(width), process_group=group), mlp_batch(width))]


FLAGS = (
    Flag("--ranks", "A,B", counts, "1,2"),
    Flag("--calls", "N", positive, 200, "of a turn"),
    Flag("--widths", "A,B", counts, "512,2048", "of the MLPs"),
    Flag("--seconds", "S", seconds, 6.0, "for one measurement, about"),
)
BENCHMARK = Benchmark("recorder", __doc__, plan, tables, FLAGS, repeats=5)
rank = functools.partial(run_rank, measure)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, rank))
