"""What communication adds to a training step with DistributedDataParallel: shm beside gloo.

Copies of one model take turns in the same processes: without communication, with DDP through shm, and through gloo; so
whatever else the machine does hits all of them alike. Those that communicate must end with the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.bench import machine
from phalanx.bench.arguments import CommonSettings, counts, new_parser, positive, seconds
from phalanx.bench.ddp_step_table import GLOO, OURS, PLAIN, SHM, tables
from phalanx.bench.jobs import Job, under_phalanx
from phalanx.bench.report import Report
from phalanx.bench.rows import rows
from phalanx.bench.steps import take

_MODELS = ("MLP", "transformer")

_METHOD = """\
{repeats} repeats. A turn is a barrier and one step: zero_grad, forward, backward, and SGD. It lasts from the first
rank's start to the last one's end. The models: an MLP of three linear layers of {width} x {width} with 8 samples a
rank, and a transformer encoder of six layers of width {inner} with 4 x 64 tokens a rank. Steps without communication
are those of the plain model. Times are medians over all turns, with the quartiles; differences and ratios are those of
the medians of each repeat, with the extremes. Each rank has one thread."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    ranks: tuple[int, ...]
    width: int
    seconds: float
    wrappers: bool


def measure(settings: Settings) -> Report:
    described = machine.describe()
    series = [each for found in take(list(plan(settings))) for each in found]
    method = _METHOD.format(repeats=settings.repeats, width=settings.width, inner=settings.width * 3 // 16)
    return Report("ddp-step", "DDP's training steps", described, settings, series, method, tables(rows(series)))


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("ddp-step", __doc__, repeats=3, timeout=300.0)
    parser.add_argument("--ranks", metavar="A,B", type=counts, default="2,4", help="default %(default)s")
    parser.add_argument(
        "--width", metavar="N", type=positive, default=2048, help="of the MLP, a multiple of 32; default %(default)s"
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=seconds,
        default=10.0,
        help="for one model in one job, about; default %(default)s",
    )
    parser.add_argument(
        "--wrappers", action="store_true", help="also px.data_parallel beside plain DDP, each in processes of its own"
    )
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.width % 32:
        parser.error(f"--width is {settings.width}; give a multiple of 32, for the transformer's six heads")
    return settings


def plan(settings: Settings) -> Iterator[Job]:
    order = {"models": _MODELS, "width": settings.width, "seconds": settings.seconds}
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            turn = (repeat, settings.repeats, settings.timeout)
            yield Job("DDP", "ddp_step_rank.py", under_phalanx, ranks, order, *turn)
            ways = [f"{backend}, {wrapper}" for backend in (SHM, GLOO) for wrapper in (PLAIN, OURS)]
            for only in ways if settings.wrappers else ():
                yield Job(only, "ddp_step_rank.py", under_phalanx, ranks, {**order, "only": only}, *turn)
