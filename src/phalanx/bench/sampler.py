"""How fast samplers give their first index and a whole epoch, and what they hold in memory: ShardSampler beside
torch's DistributedSampler and, where installed, torchdata's StatefulDistributedSampler.

Each figure is taken in a process of its own, and within a repeat the samplers take turns.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.bench import machine
from phalanx.bench.arguments import CommonSettings, counts, new_parser, positive
from phalanx.bench.command import running
from phalanx.bench.report import Report, say
from phalanx.bench.sampler_table import OURS, TORCH, TORCHDATA, Sample, tables
from phalanx.bench.steps import take

_BYTES = 48
"""That DistributedSampler takes for each sample at its peak: a Python int, and its places in two lists."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    lengths: tuple[int, ...]
    epoch_lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    longest_list: int


@dataclass(frozen=True)
class Visit:
    """One process, or the reason why there is none."""

    measure: str
    contender: str
    length: int
    world: int
    repeat: int
    repeats: int
    timeout: float
    reason: str = ""
    script: str = "sampler_probe.py"

    def __str__(self) -> str:
        place = f"{self.length} samples, {self.world} rank{'s' * (self.world > 1)}"
        return f"{self.measure}, {self.contender}, {place}, repeat {self.repeat + 1} of {self.repeats}"

    def run(self, place: Path) -> list[Sample]:
        if self.reason:
            return [Sample(self.measure, self.contender, self.length, self.world, self.repeat, None, self.reason)]
        what = (self.measure, self.contender, str(self.length), str(self.world))
        # Without large pages, which numpy asks the kernel for: a megabyte could not be told from two.
        line = ["env", "NUMPY_MADVISE_HUGEPAGE=0", sys.executable, str(place / self.script), str(place), *what]
        with running(line, place, self.timeout) as command:
            command.finish()
            notes = json.loads((place / "notes.json").read_text())
        return [
            Sample(measure, self.contender, self.length, self.world, self.repeat, value)
            for measure, value in notes.items()
        ]

    def outcome(self, result: list[Sample]) -> str:
        return self.reason or ", ".join(f"{sample.measure} {sample.value:.4g}" for sample in result)


def measure(settings: Settings) -> Report:
    if not machine.installed("torchdata"):
        say("torchdata is not installed, so it is left out")
    described = machine.describe("numpy", "torchdata")
    samples = [sample for found in take(list(plan(settings))) for sample in found]
    method = (
        f"{settings.repeats} repeats, each figure in a fresh process, the samplers taking turns within a repeat. "
        "Figures are medians, with the extremes behind; ratios are taken within a repeat."
    )
    return Report("sampler", "Samplers", described, settings, samples, method, tables(samples))


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("sampler", __doc__, repeats=3, timeout=120.0)
    parser.add_argument(
        "--lengths",
        metavar="A,B",
        type=lengths,
        default="1e6,1e8,1e9,1e12",
        help="for the first index and memory; default %(default)s",
    )
    parser.add_argument(
        "--epoch-lengths", metavar="A,B", type=lengths, default="1e6,1e7", help="for epochs; default %(default)s"
    )
    parser.add_argument("--ranks", metavar="A,B", type=counts, default="1,8", help="for epochs; default %(default)s")
    parser.add_argument(
        "--longest-list",
        metavar="N",
        type=length,
        default="1e8",
        help=f"samplers that hold all indices, about {_BYTES} bytes each, are left out above; default %(default)s",
    )
    return Settings(**vars(parser.parse_args(argv)))


def lengths(text: str) -> tuple[int, ...]:
    return tuple(sorted({length(part) for part in text.split(",")}))


def length(text: str) -> int:
    """A whole number, 1e6 as well."""
    found = re.fullmatch(r"(\d+)(?:e(\d+))?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return positive(found[1]) * 10 ** int(found[2] or 0)


# ---- what is measured, and in which order


def plan(settings: Settings) -> Iterator[Visit]:
    contenders = [OURS, TORCH, *([TORCHDATA] if machine.installed("torchdata") else [])]
    pieces = [("first", each, 1) for each in settings.lengths]
    pieces += [("epoch", each, world) for each in settings.epoch_lengths for world in settings.ranks]
    for repeat in range(settings.repeats):
        for measure, size, world in pieces:
            for contender in contenders:
                reason = _too_long(contender, size, settings.longest_list)
                yield Visit(measure, contender, size, world, repeat, settings.repeats, settings.timeout, reason)


def _too_long(contender: str, size: int, longest: int) -> str:
    if contender == OURS or size <= longest:
        return ""
    return f"left out: its list would take {size * _BYTES / 1e9:,.0f} GB"
