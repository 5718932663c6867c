"""What `px.track` and `px.log` add to a training step: a loop with them beside the same loop without.

The work of a step is waiting for the clock, which is the same for both, so that what is left is what they cost. Both
loops take turns in the same processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.bench import machine
from phalanx.bench.arguments import CommonSettings, counts, new_parser, positive, seconds
from phalanx.bench.jobs import Job, under_phalanx
from phalanx.bench.report import Report, grid
from phalanx.bench.rows import Row, rows
from phalanx.bench.steps import take

BARE, TRACKED = "bare", "tracked"
_GOAL = 0.01

_METHOD = """\
{repeats} repeats. A turn is a barrier and an epoch of {steps} steps. It lasts from the first rank's start to the last
one's end. With px.track every step is timed, counted and told to the sampler, the heartbeat is written, px.log is
called, and once a second the ranks tell each other where they stand. Times are medians over all turns, with the
quartiles; the cost is what an epoch with px.track takes longer than the one without beside it: the median of each
repeat, and of these the median and the extremes."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    ranks: tuple[int, ...]
    milliseconds: float
    steps: int
    seconds: float


def measure(settings: Settings) -> Report:
    described = machine.describe()
    series = [each for found in take(list(plan(settings))) for each in found]
    method = _METHOD.format(repeats=settings.repeats, steps=settings.steps)
    return Report("track", "What px.track costs", described, settings, series, method, table(rows(series), settings))


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("track", __doc__, repeats=3, timeout=120.0)
    parser.add_argument("--ranks", metavar="A,B", type=counts, default="1,2", help="default %(default)s")
    parser.add_argument(
        "--milliseconds", metavar="MS", type=seconds, default=5.0, help="of a step's work; default %(default)s"
    )
    parser.add_argument("--steps", metavar="N", type=positive, default=100, help="in an epoch; default %(default)s")
    parser.add_argument(
        "--seconds", metavar="S", type=seconds, default=8.0, help="for one job, about; default %(default)s"
    )
    return Settings(**vars(parser.parse_args(argv)))


def plan(settings: Settings) -> Iterator[Job]:
    order = {"milliseconds": settings.milliseconds, "steps": settings.steps, "seconds": settings.seconds}
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            yield Job("track", "track_rank.py", under_phalanx, ranks, order, repeat, settings.repeats, settings.timeout)


def table(found: Sequence[Row], settings: Settings) -> str:
    header = [
        "ranks",
        "work of a step, ms",
        "without, µs a step",
        "with px.track, µs a step",
        "cost, µs",
        "cost",
        "goal",
    ]
    body = []
    for row in found:
        cost = row.cost(TRACKED, BARE)
        assert cost is not None, "both loops ran in every repeat"
        work = settings.milliseconds if row.measure == "work" else 0.0
        times = [row.times[name].show(settings.steps, 1) for name in (BARE, TRACKED)]
        share = cost.median / row.times[BARE].median
        verdict = ["", ""] if not work else [f"{share:.2%}", f"≤ 1 %: {'met' if share <= _GOAL else 'missed'}"]
        body.append([str(row.ranks), f"{work:g}", *times, cost.show(settings.steps, 1), *verdict])
    return "\n".join(["## A step with and without", "", *grid([header, *body])])
