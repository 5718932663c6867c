"""How fast collectives of one machine are: shm beside gloo and, where installed, Open MPI.

shm and gloo take turns in the same processes, and jobs of torch and of MPI take turns within a repeat, so whatever else
the machine does hits all of them alike. Every turn's result is checked; a wrong number ends the benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.bench import collectives_plot, machine
from phalanx.bench.arguments import CommonSettings, counts, new_parser, seconds, size, sizes
from phalanx.bench.collectives_goals import MB, OTHERS
from phalanx.bench.collectives_table import tables
from phalanx.bench.jobs import Job, mpi_version, under_mpi, under_phalanx
from phalanx.bench.numbers import MOST_RANKS
from phalanx.bench.report import Report, say
from phalanx.bench.rows import rows
from phalanx.bench.steps import take

_SIZES = "4,256,1K,4K,16K,64K,256K,1M,4M,16M,25M,64M,256M"
_SINGLE_FROM = MB
_CALLS = 100
_TOGETHER = 4 * MB

_METHOD = f"""\
{{repeats}} repeats, the contenders taking turns within each. A turn is a barrier and one call; below
{_SINGLE_FROM // MB} MB, up to {_CALLS} calls back to back, of {_TOGETHER // MB} MB together, whose time is divided
by their number. It lasts from the first rank's start to the last one's end. Times are medians over all turns, with
the quartiles; ratios are those of the medians of each repeat, with the extremes. Each rank has one thread. KB and MB
are 2^10 and 2^20 bytes; the size of all_gather is that of its output, of reduce_scatter that of its input."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    other_size: int
    seconds: float


def measure(settings: Settings) -> Report:
    mpi = mpi_version()
    if mpi is None:
        say("mpirun or mpi4py is not installed, so MPI is left out")
    described = {**machine.describe("numpy"), "MPI": mpi or "not installed"}
    series = [each for found in take(list(plan(settings, mpi is not None))) for each in found]
    found = rows(series)
    return Report(
        "collectives",
        "Collectives of one machine",
        described,
        settings,
        series,
        _METHOD.format(repeats=settings.repeats),
        tables(found),
        lambda path, about: collectives_plot.draw(found, path, about),
    )


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("collectives", __doc__, repeats=4, timeout=300.0)
    parser.add_argument("--ranks", metavar="A,B", type=counts, default="2,4", help="default %(default)s")
    parser.add_argument("--sizes", metavar="A,B", type=sizes, default=_SIZES, help="of all_reduce, default %(default)s")
    parser.add_argument(
        "--other-size", metavar="A", type=size, default="25M", help="of the other collectives, default %(default)s"
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=seconds,
        default=0.3,
        help="for one collective of one size in one job, about; default %(default)s",
    )
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.ranks[-1] > MOST_RANKS:
        parser.error(
            f"--ranks has {settings.ranks[-1]}; the results of more than {MOST_RANKS} cannot be checked exactly"
        )
    return settings


def plan(settings: Settings, with_mpi: bool) -> Iterator[Job]:
    order = {
        "sizes": settings.sizes,
        "calls": _CALLS,
        "single_from": _SINGLE_FROM,
        "together": _TOGETHER,
        "limit": settings.sizes[-1],
        "others": OTHERS,
        "other_size": settings.other_size,
        "seconds": settings.seconds,
    }
    smallest = {**order, "sizes": settings.sizes[:1], "limit": 0, "others": ()}
    for repeat in range(settings.repeats):
        turn = (repeat, settings.repeats, settings.timeout)
        for ranks in settings.ranks:
            yield Job("shm and gloo", "collectives_rank.py", under_phalanx, ranks, order, *turn)
            if with_mpi:
                yield Job("MPI", "collectives_mpi.py", under_mpi, ranks, order, *turn)
        yield Job("shm and gloo", "collectives_rank.py", under_phalanx, 1, smallest, *turn)
