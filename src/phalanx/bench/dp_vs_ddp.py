"""Why DDP is preferred to DP: training steps of one model on the same batches, in one process and in several.

One process with one thread and with all of them, one process with replicas in threads (DP), and one process for each
replica (DDP, through shm and through gloo) take turns. All must end with the same parameters.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.bench import machine
from phalanx.bench.arguments import CommonSettings, new_parser, positive, seconds
from phalanx.bench.dp_vs_ddp_table import tables
from phalanx.bench.jobs import Job, under_phalanx
from phalanx.bench.report import Report
from phalanx.bench.steps import take

_MODELS = ("MLP", "CNN", "deep MLP")

_METHOD = """\
{repeats} repeats. A step is zero_grad, forward, cross entropy, backward and SGD, on the same {batch} samples for all:
DP cuts them, and each rank of DDP has its part. The models: an MLP of four linear layers of {width} x {width}, a CNN of
three convolutions on images of 32 x 32, and an MLP of forty layers of 64 x 64, where Python takes longer than the
arithmetic. The contenders take turns in the same processes; whoever has nothing to do sleeps at a barrier. DP comes as
it is, and each of its threads with a share of the cores; each rank of DDP has a share of the cores. Times are medians
over all turns, with the quartiles; ratios are those of the medians of each repeat, with the extremes."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    models: tuple[str, ...]
    replicas: int
    batch: int
    width: int
    seconds: float


def measure(settings: Settings) -> Report:
    described = machine.describe()
    series = [each for found in take(list(plan(settings))) for each in found]
    method = _METHOD.format(repeats=settings.repeats, batch=settings.batch, width=settings.width)
    text = tables(series, settings.replicas)
    return Report("dp-vs-ddp", "DP beside DDP", described, settings, series, method, text)


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("dp-vs-ddp", __doc__, repeats=3, timeout=300.0)
    parser.add_argument("--models", metavar="A,B", type=_models, default=",".join(_MODELS), help="default %(default)s")
    parser.add_argument(
        "--replicas", metavar="N", type=positive, default=2, help="of DP, and ranks of DDP; default %(default)s"
    )
    parser.add_argument("--batch", metavar="N", type=positive, default=64, help="of all together; default %(default)s")
    parser.add_argument("--width", metavar="N", type=positive, default=1024, help="of the MLP; default %(default)s")
    parser.add_argument(
        "--seconds", metavar="S", type=seconds, default=5.0, help="for one model in one job; default %(default)s"
    )
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.batch % settings.replicas or settings.replicas == 1:
        parser.error(f"--batch {settings.batch} --replicas {settings.replicas}: give at least 2, and a multiple of it")
    return settings


def _models(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in _MODELS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(_MODELS)}")
    return names


def plan(settings: Settings) -> Iterator[Job]:
    """Steps on as many ranks as there are replicas; then, on one, where the time of DP's steps goes."""
    order = {
        "models": settings.models,
        "replicas": settings.replicas,
        "batch": settings.batch,
        "width": settings.width,
        "cores": len(os.sched_getaffinity(0)),
        "seconds": settings.seconds,
    }
    for repeat in range(settings.repeats):
        turn = (repeat, settings.repeats, settings.timeout)
        yield Job("steps", "dp_vs_ddp_rank.py", under_phalanx, settings.replicas, order, *turn)
        yield Job("the parts of a step", "dp_vs_ddp_rank.py", under_phalanx, 1, order, *turn)
