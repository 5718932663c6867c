"""How fast shm is over several nodes, beside gloo from rank to rank: two virtual nodes, with a link of known bandwidth.

shm and gloo take turns in the same processes, so whatever else the machine does hits both alike. Every result is
checked; a wrong number ends the benchmark. It takes root, for the virtual nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.bench import machine, nodes_plot
from phalanx.bench.arguments import CommonSettings, counts, new_parser, positive, seconds, sizes
from phalanx.bench.jobs import Job
from phalanx.bench.nodes_table import tables
from phalanx.bench.numbers import MOST_RANKS
from phalanx.bench.on_nodes import NODES, UNSHAPED
from phalanx.bench.report import Report
from phalanx.bench.rows import rows
from phalanx.bench.steps import take
from phalanx.errors import UsageError
from phalanx.testing.virtual_links import bits_per_second

_SINGLE_FROM = 2**18
_CALLS = 20

_METHOD = f"""\
{{repeats}} repeats. {NODES} virtual nodes on this machine (network namespaces), so all ranks share its cores, whatever
the link. A turn is a barrier and one call, or {_CALLS} calls back to back below {_SINGLE_FROM // 2**10} KB, whose time
is divided by their number; or one step of DDP: zero_grad, forward, backward and SGD of an MLP of three linear layers of
{{width}} x {{width}} with 8 samples a rank. It lasts from the first rank's start to the last one's end. Times are
medians over all turns, with the quartiles; ratios are those of the medians of each repeat, with the extremes. Each rank
has one thread. KB and MB are 2^10 and 2^20 bytes. "Of the link" is the time that the link needs at least, divided by
shm's: each node has to send the other one as many bytes as the tensor has; headers of packets, 4 to 5 % more, are not
counted. Flat gloo sends 2 (n - 1) / n times as many: 1.5 times with 4 ranks, 1.75 times with 8. So where gloo fills the
link, too, shm cannot be faster by more than that."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    per_node: tuple[int, ...]
    links: tuple[str, ...]
    sizes: tuple[int, ...]
    width: int
    seconds: float


def measure(settings: Settings) -> Report:
    if os.geteuid() != 0:
        raise UsageError(f"virtual nodes need root, and this is user {os.geteuid()}; run the benchmark as root.")
    described = machine.describe("numpy")
    series = [each for found in take(list(plan(settings))) for each in found]
    found = rows(series)
    return Report(
        "nodes",
        "Over several nodes",
        described,
        settings,
        series,
        _METHOD.format(repeats=settings.repeats, width=settings.width),
        tables(found),
        lambda path, about: nodes_plot.draw(found, path, about),
    )


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("nodes", __doc__, repeats=3, timeout=600.0)
    parser.add_argument(
        "--per-node", metavar="A,B", type=counts, default="2,4", help="ranks of each node, default %(default)s"
    )
    parser.add_argument(
        "--links", metavar="A,B", type=_links, default=f"{UNSHAPED},1gbit,100mbit", help="default %(default)s"
    )
    parser.add_argument(
        "--sizes", metavar="A,B", type=sizes, default="4K,1M,25M", help="of all_reduce, default %(default)s"
    )
    parser.add_argument("--width", metavar="N", type=positive, default=1024, help="of the model, default %(default)s")
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=seconds,
        default=5.0,
        help="for one piece of work in one job, about; default %(default)s",
    )
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.per_node[-1] * NODES > MOST_RANKS:
        parser.error(
            f"--per-node has {settings.per_node[-1]}; the results of more than {MOST_RANKS // NODES} on each of "
            f"{NODES} nodes cannot be checked exactly"
        )
    return settings


def _links(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for link in found:
        try:
            if link != UNSHAPED:
                bits_per_second(link)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return found


def plan(settings: Settings) -> Iterator[Job]:
    for repeat in range(settings.repeats):
        turn = (repeat, settings.repeats, settings.timeout)
        for each in settings.per_node:
            for link in settings.links:
                order = {
                    "link": link,
                    "sizes": settings.sizes,
                    "calls": _CALLS,
                    "single_from": _SINGLE_FROM,
                    "together": _CALLS * _SINGLE_FROM,
                    "width": settings.width,
                    "seconds": settings.seconds,
                }
                launcher = functools.partial(_on_nodes, link)
                yield Job(f"{NODES} nodes, {link}", "nodes_rank.py", launcher, each * NODES, order, *turn)


@contextlib.contextmanager
def _on_nodes(link: str, ranks: int) -> Iterator[list[str]]:
    yield [sys.executable, "-m", "phalanx.bench.on_nodes", link, str(ranks // NODES)]
