"""What a stop point adds to an optimizer's step while nobody asks for a stop: the step with it, and without.

Both take turns in the same processes: for one of them the hook is taken out of torch's list, the rest of the recorder
stays. A turn is a barrier and a number of steps of an optimizer that has nothing to do, in a group of all ranks, so
that the clock of the world is read as in training.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from common import main, read_order
from torch.optim.optimizer import _global_optimizer_post_hooks

from phalanx.bench.commands import Settings, Step, job
from phalanx.bench.common import Benchmark, Flag, Row, compare, counts, positive, seconds
from phalanx.bench.ranks import Contender, Turns, agree
from phalanx.recorder import phases

OFF, ON = "off", "on"


def plan(settings: Settings) -> Iterator[Step]:
    order = {name: getattr(settings, name) for name in ("steps", "seconds")}
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            yield job("stop-point", (__file__, "--rank"), ranks, order, (repeat, settings))


def tables(rows: Sequence[Row], settings: Settings) -> list[str]:
    title = f"{settings.steps} optimizer steps, with stop points and without"
    return [compare(title, rows, (OFF, ON), costs=[(ON, OFF)])]


def rank(directory: Path) -> None:
    order = read_order(directory)
    dist.init_process_group("gloo")
    turns = Turns(dist.barrier, agree, order["seconds"])
    turns.measure("steps", 0, [Contender(name, [stepper(name == ON, order["steps"])]) for name in (OFF, ON)])
    turns.write(directory, dist.get_rank())
    dist.destroy_process_group()


def stepper(is_on: bool, steps: int) -> Callable[[], None]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # no gradient: nothing but hooks
    hooks = _global_optimizer_post_hooks
    (key,) = [key for key, hook in hooks.items() if hook is phases._reach_stop_point]

    def run() -> None:
        if not is_on:
            del hooks[key]
        for _ in range(steps):
            optimizer.step()
        hooks[key] = phases._reach_stop_point

    return run


FLAGS = (
    Flag("--ranks", "A,B", counts, "1,2"),
    Flag("--steps", "N", positive, 1000, "in a turn"),
    Flag("--seconds", "S", seconds, 8.0, "for one job, about"),
)
BENCHMARK = Benchmark("stop-point", __doc__, plan, tables, FLAGS)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, rank))
