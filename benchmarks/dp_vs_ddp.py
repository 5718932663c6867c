"""Why DDP is preferred to DP: training steps of one model on the same batches, in one process and in several.

One process with one thread and with all of them, one process with replicas in threads (DP), and one process for each
replica (DDP, through shm and through gloo) take turns; whoever has nothing to do sleeps at a barrier. All must end
with the same parameters. DP comes as it is, and each of its threads with a share of the cores, as each rank of DDP
has it. The models: an MLP of four linear layers, a CNN of three convolutions on images of 32 x 32, and an MLP of
forty layers of 64 x 64, where Python takes longer than the arithmetic.
"""

import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from common import Batch, Order, check_same, main, mlp, run_rank, stepper
from torch import nn

from phalanx.bench.commands import Settings, Step, job
from phalanx.bench.common import Benchmark, Flag, Row, among, compare, positive, seconds
from phalanx.bench.ranks import Contender, Groups, Span, Turns, do_nothing
from phalanx.errors import UsageError
from phalanx.parallel import data_parallel
from phalanx.parallel.replicas import Replicas, gather, replicate, run, scatter

ONE, ALL, DP, DP_SHARED, DDP, DDP_GLOO = "one thread", "all threads", "dp", "dp, cores shared", "ddp shm", "ddp gloo"
PARTS = ("scatter", "replicate", "forward", "gather", "backward", "optimizer")
MODELS = ("MLP", "CNN", "deep MLP")
PART_ROUNDS, WARM_UPS = 30, 3


def plan(settings: Settings) -> Iterator[Step]:
    """Steps on as many ranks as there are replicas; then, on one, where the time of DP's steps goes."""
    if settings.batch % settings.replicas or settings.replicas == 1:
        given = f"--batch {settings.batch} --replicas {settings.replicas}"
        raise UsageError(f"{given}: give at least 2 replicas, and a batch that is a multiple of them.")
    order = {name: getattr(settings, name) for name in ("models", "replicas", "batch", "width", "seconds")}
    order |= {"cores": len(os.sched_getaffinity(0))}
    for repeat in range(settings.repeats):
        yield job("steps", (__file__, "--rank"), settings.replicas, order, (repeat, settings))
        yield job("the parts of a step", (__file__, "--rank"), 1, order, (repeat, settings))


def tables(rows: Sequence[Row], _: Settings) -> list[str]:
    steps, parts = [row for row in rows if row.ranks > 1], [row for row in rows if row.ranks == 1]
    ratios = [(DP, DDP), (DP_SHARED, DDP), (ONE, DDP), (ONE, DP), (ONE, DP_SHARED)]
    return [
        compare("A training step", steps, (ONE, ALL, DP, DP_SHARED, DDP, DDP_GLOO), ratios),
        compare("Where DP's time goes", parts, PARTS),
    ]


def measure(turns: Turns, groups: Groups, order: Order) -> None:
    for name in order["models"]:
        if groups["shm"].size() == 1:
            _parts(turns, name, order)
        else:
            _steps(turns, groups, name, order)
        gc.collect()


def _steps(turns: Turns, groups: Groups, name: str, order: Order) -> None:
    rank, replicas, cores = dist.get_rank(), order["replicas"], order["cores"]
    made: dict[str, nn.Module] = {
        ONE: _model(name, order),
        ALL: _model(name, order),
        # Not by data_parallel, which refuses it among several ranks.
        DP: Replicas(_model(name, order), replicas),
        DP_SHARED: Replicas(_model(name, order), replicas),
        DDP: data_parallel(_model(name, order)),
        DDP_GLOO: data_parallel(_model(name, order), process_group=groups["gloo"]),
    }
    threads = {ONE: 1, ALL: cores, DP: cores}
    batch = _batch(name, order)
    own = (batch[0].chunk(replicas)[rank], batch[1].chunk(replicas)[rank])
    contenders = []
    for contender, model in made.items():
        is_ddp = contender.startswith("ddp")
        step = stepper(model, own if is_ddp else batch, lr=1e-2) if is_ddp or rank == 0 else do_nothing
        prepare = functools.partial(torch.set_num_threads, threads.get(contender, max(1, cores // replicas)))
        contenders.append(Contender(contender, [step], prepare))
    size = sum(4 * parameter.numel() for parameter in made[ONE].parameters())
    turns.measure(name, size, contenders)
    if rank == 0:
        check_same(made, list(made), rtol=1e-2, atol=1e-4)


def _parts(turns: Turns, name: str, order: Order) -> None:
    """The parts of a step in one process with one thread, and of one with replicas."""
    share = max(1, order["cores"] // order["replicas"])
    for kind, threads, replicas in ((ONE, 1, 1), (DP_SHARED, share, order["replicas"])):
        torch.set_num_threads(threads)
        model, batch = _model(name, order), _batch(name, order)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        rounds = [_timed_step(model, optimizer, batch, replicas) for _ in range(PART_ROUNDS)][WARM_UPS:]
        for part in rounds[0]:
            turns.add(f"{name}: {kind}", 0, part, [spans[part] for spans in rounds])


def _timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, replicas: int) -> dict[str, Span]:
    """What `Replicas` does at each step, with a look at the clock in between."""
    moments: list[tuple[str, float]] = [("", time.monotonic())]

    def done(part: str) -> None:
        moments.append((part, time.monotonic()))

    optimizer.zero_grad()
    if replicas == 1:
        outputs = model(batch[0])
        done("forward")
    else:
        calls = scatter(((batch[0],), {}), replicas)
        done("scatter")
        copies = replicate(model, len(calls))
        done("replicate")
        parts = run(copies, calls)
        done("forward")
        outputs = gather(parts)
        done("gather")
    nn.functional.cross_entropy(outputs, batch[1]).backward()
    done("backward")
    optimizer.step()
    done("optimizer")
    return {part: (before, moment) for (_, before), (part, moment) in itertools.pairwise(moments)}


def _model(name: str, order: Order) -> nn.Module:
    torch.manual_seed(0)
    if name == "CNN":
        return nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
        )
    return mlp(order["width"], 4) if name == "MLP" else mlp(64, 40)


def _batch(name: str, order: Order) -> Batch:
    torch.manual_seed(1)
    shape = {"MLP": (order["width"],), "CNN": (3, 32, 32), "deep MLP": (64,)}[name]
    return torch.randn(order["batch"], *shape), torch.randint(10, (order["batch"],))


FLAGS = (
    Flag("--models", "A,B", among(MODELS), ",".join(MODELS)),
    Flag("--replicas", "N", positive, 2, "of DP, and ranks of DDP"),
    Flag("--batch", "N", positive, 64, "of all together"),
    Flag("--width", "N", positive, 1024, "of the MLP"),
    Flag("--seconds", "S", seconds, 5.0, "for one model in one job"),
)
BENCHMARK = Benchmark("dp-vs-ddp", __doc__, plan, tables, FLAGS, timeout=300.0)

# gloo's barrier sleeps; that of shm would take a core from the contender that works in one process.
rank = functools.partial(run_rank, measure, barrier="gloo")

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, rank))
