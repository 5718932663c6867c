"""What the recorder adds to a collective and to a training step: the same work with a status page and without one.

Both take turns in the same processes. Through shm the page is written by the ranks as they go; through gloo a thread
of each rank reads torch's flight recorder, which is always on.
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

WITHOUT, WITH = "without", "with"
MOST_MICROSECONDS = 2.0
MOST_SHARE = 0.01

_METHOD = """\
{repeats} repeats. A turn is a barrier and {calls} calls of all_reduce, or a training step of an MLP with DDP. It lasts
from the first rank's start to the last one's end. Times are medians over all turns, with the quartiles; the cost
is what a turn with the recorder takes longer than the one without beside it: the median of each repeat, and of these
the median and the extremes."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    ranks: tuple[int, ...]
    calls: int
    widths: tuple[int, ...]
    seconds: float


def measure(settings: Settings) -> Report:
    described = machine.describe()
    series = [each for found in take(list(plan(settings))) for each in found]
    method = _METHOD.format(repeats=settings.repeats, calls=settings.calls)
    return Report("recorder", "What the recorder costs", described, settings, series, method, table(rows(series)))


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("recorder", __doc__, repeats=5, timeout=120.0)
    parser.add_argument("--ranks", metavar="A,B", type=counts, default="1,2", help="default %(default)s")
    parser.add_argument("--calls", metavar="N", type=positive, default=200, help="of a turn; default %(default)s")
    parser.add_argument(
        "--widths", metavar="A,B", type=counts, default="512,2048", help="of the MLPs; default %(default)s"
    )
    parser.add_argument(
        "--seconds", metavar="S", type=seconds, default=6.0, help="for one measurement, about; default %(default)s"
    )
    return Settings(**vars(parser.parse_args(argv)))


def plan(settings: Settings) -> Iterator[Job]:
    order = {name: getattr(settings, name) for name in ("calls", "widths", "seconds")}
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            yield Job(
                "recorder", "recorder_rank.py", under_phalanx, ranks, order, repeat, settings.repeats, settings.timeout
            )


def table(found: Sequence[Row]) -> str:
    header = ["ranks", "what", "without, µs", "with the recorder, µs", "cost, µs", "cost", "goal"]
    return "\n".join(["## With and without", "", *grid([header, *map(_line, found)])])


def _line(row: Row) -> list[str]:
    cost = row.cost(WITH, WITHOUT)
    assert cost is not None, "both ran in every repeat"
    share = cost.median / row.times[WITHOUT].median
    if "all_reduce" in row.measure:
        goal, is_met = f"≤ {MOST_MICROSECONDS:g} µs", cost.median <= MOST_MICROSECONDS
    else:
        goal, is_met = f"≤ {MOST_SHARE:.0%}", share <= MOST_SHARE
    times = [row.times[name].show(1, 2) for name in (WITHOUT, WITH)]
    verdict = f"{goal}: {'met' if is_met else 'missed'}"
    return [str(row.ranks), row.measure, *times, cost.show(1, 2), f"{share:.2%}", verdict]
