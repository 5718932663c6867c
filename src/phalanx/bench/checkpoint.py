"""How long a training loop is held up by a checkpoint, and how long it takes until that is on the disk.

px.Checkpointer beside torch.save on rank 0, torch.distributed.checkpoint (DCP) as it comes, and DCP's async_save. They
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
CONTENDERS = (PHALANX, "torch.save on rank 0", "DCP save", "DCP async_save")
HELD, DURABLE = "held up", "durable"
_MILLI = 1e3
"""µs in a ms."""

_METHOD = """\
{repeats} repeats of {rounds} rounds, after one that does not count. In a round each contender saves the same state, a
dict of 16 tensors, once, and its files are removed before the next one begins. Held up: from the first rank's call to
the last one's return. Durable: to the moment when every rank knows that the files are synced. Times are medians over
all rounds, with the quartiles; ratios are those of the medians of each repeat, with the extremes. Each rank has one
thread, and only saves: what a write takes from training beside it is not measured. At the end of each job every
contender's last checkpoint is loaded and compared with what was saved."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    ranks: tuple[int, ...]
    megabytes: tuple[int, ...]
    rounds: int


def measure(settings: Settings) -> Report:
    described = machine.describe()
    series = [each for found in take(list(plan(settings))) for each in found]
    method = _METHOD.format(repeats=settings.repeats, rounds=settings.rounds)
    return Report("checkpoint", "Saving checkpoints", described, settings, series, method, tables(rows(series)))


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("checkpoint", __doc__, repeats=3, timeout=600.0)
    parser.add_argument("--ranks", metavar="A,B", type=counts, default="2,4", help="default %(default)s")
    parser.add_argument(
        "--megabytes", metavar="A,B", type=counts, default="100,1000", help="of the state; default %(default)s"
    )
    parser.add_argument("--rounds", metavar="N", type=positive, default=5, help="in one job; default %(default)s")
    return Settings(**vars(parser.parse_args(argv)))


def plan(settings: Settings) -> Iterator[Job]:
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            for size in settings.megabytes:
                order = {"megabytes": size, "rounds": settings.rounds}
                turn = (repeat, settings.repeats, settings.timeout)
                yield Job(f"{size} MB", "checkpoint_rank.py", under_phalanx, ranks, order, *turn)


def tables(found: Sequence[Row]) -> str:
    titles = {HELD: "How long the loop is held up", DURABLE: "How long until it is on the disk"}
    return "\n\n".join(
        "\n".join([f"## {title}", "", *_table([row for row in found if row.measure == measure])])
        for measure, title in titles.items()
    )


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
