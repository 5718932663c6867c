"""How long a checkpoint holds a training loop up, what it takes from the steps after it, and when it is on the disk.

px.Checkpointer beside torch.distributed.checkpoint (DCP) and torch.save on rank 0. DCP's async_save runs with its
strongest settings (a process that writes, asynchronous staging into shared memory, cached plans) and as it comes. They
take turns in the same processes, on the same tensors and the same disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.bench import machine
from phalanx.bench.arguments import CommonSettings, counts, new_parser, positive
from phalanx.bench.jobs import Job, under_phalanx
from phalanx.bench.report import Report, grid
from phalanx.bench.rows import Row, rows
from phalanx.bench.steps import take

PHALANX = "px.Checkpointer"
CONTENDERS = (PHALANX, "DCP async_save, process", "DCP async_save", "DCP save", "torch.save on rank 0")
NOTHING = "no save"
HELD, AFTER, DURABLE = "held up", "after", "durable"
_MILLI = 1e3
"""µs in a ms."""

_METHOD = """\
{repeats} repeats of {rounds} rounds, after one that does not count. In a round each contender saves the same state,
weights and as much momentum of SGD, and its files are removed before the next one begins. Held up: from the first
rank's call to the last one's return. After: {steps} steps of training that follow at once, and by how much they take
longer than as many without a save; the loop waits for the copy before it changes the weights. Durable: to the moment
when every rank knows that the files are synced, by a save that is waited for. Times are medians over all rounds, with
the quartiles; ratios and differences are those of the medians of each repeat, with the extremes. Each rank has one
thread. At the end of each job every contender saves once more, a step follows at once, and what was saved is compared
with what was there before that step."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    ranks: tuple[int, ...]
    megabytes: tuple[int, ...]
    rounds: int
    steps: int


def measure(settings: Settings) -> Report:
    described = machine.describe()
    series = [each for found in take(list(plan(settings))) for each in found]
    method = _METHOD.format(repeats=settings.repeats, rounds=settings.rounds, steps=settings.steps)
    return Report("checkpoint", "Saving checkpoints", described, settings, series, method, tables(rows(series)))


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("checkpoint", __doc__, repeats=3, timeout=600.0)
    parser.add_argument("--ranks", metavar="A,B", type=counts, default="2,4", help="default %(default)s")
    parser.add_argument(
        "--megabytes", metavar="A,B", type=counts, default="100,1000", help="of the state; default %(default)s"
    )
    parser.add_argument("--rounds", metavar="N", type=positive, default=5, help="in one job; default %(default)s")
    parser.add_argument("--steps", metavar="N", type=positive, default=20, help="after a save; default %(default)s")
    return Settings(**vars(parser.parse_args(argv)))


def plan(settings: Settings) -> Iterator[Job]:
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            for size in settings.megabytes:
                order = {"megabytes": size, "rounds": settings.rounds, "steps": settings.steps}
                turn = (repeat, settings.repeats, settings.timeout)
                yield Job(f"{size} MB", "checkpoint_rank.py", under_phalanx, ranks, order, *turn)


def tables(found: Sequence[Row]) -> str:
    titles = {HELD: "How long the loop is held up", DURABLE: "How long until it is on the disk"}
    parts = [("## " + titles[measure], _table([row for row in found if row.measure == measure])) for measure in titles]
    parts.insert(
        1, ("## How much longer the steps after it take", _after([row for row in found if row.measure == AFTER]))
    )
    return "\n\n".join("\n".join([title, "", *lines]) for title, lines in parts)


def _table(found: Sequence[Row]) -> list[str]:
    others = CONTENDERS[1:]
    header = ["state, MB", "ranks", *(f"{name}, ms" for name in CONTENDERS)]
    header += [f"{name} ÷ {PHALANX}" for name in others]
    body = []
    for row in sorted(found, key=lambda row: (row.size, row.ranks)):
        ratios = [row.ratio(name, PHALANX) for name in others]
        times = [row.times[name].show(_MILLI, 1) for name in CONTENDERS]
        body.append([f"{row.size // 10**6}", str(row.ranks), *times, *(each.show() if each else "" for each in ratios)])
    return grid([header, *body])


def _after(found: Sequence[Row]) -> list[str]:
    names = CONTENDERS[:3]
    header = ["state, MB", "ranks", f"{NOTHING}, ms", *(f"{name}, ms more" for name in names)]
    body = []
    for row in sorted(found, key=lambda row: (row.size, row.ranks)):
        costs = [row.cost(name, NOTHING) for name in names]
        shown = [each.show(_MILLI, 1) if each else "" for each in costs]
        body.append([f"{row.size // 10**6}", str(row.ranks), row.times[NOTHING].show(_MILLI, 1), *shown])
    return grid([header, *body])
