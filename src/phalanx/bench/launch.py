"""How fast jobs start, restart, and what they hold in memory: phalanx beside torchrun, mp.spawn and accelerate.

Within a repeat the contenders take turns, so whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.bench import contenders, machine, measures, plot, table
from phalanx.bench.arguments import CommonSettings, counts, new_parser
from phalanx.bench.contenders import EXEC, FORK, TORCHRUN, Contender
from phalanx.bench.report import Report, say
from phalanx.bench.results import HELP, Sample
from phalanx.bench.steps import take

_HELP_REPEATS = 10


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    ranks: tuple[int, ...]
    memory_ranks: int
    restart_ranks: int


@dataclass(frozen=True)
class Step:
    """One command to measure."""

    measure: str
    contender: str
    ranks: int
    repeat: int
    repeats: int
    how: Callable[[Path], measures.Outcome]
    """Does it, in a directory of its own."""
    script: str = "probe.py"

    def __str__(self) -> str:
        ranks = f", {self.ranks} rank{'s' * (self.ranks > 1)}" if self.ranks else ""
        return f"{self.measure}, {self.contender}{ranks}, repeat {self.repeat + 1} of {self.repeats}"

    def run(self, place: Path) -> Sample:
        value, note = self.how(place)
        return Sample(self.measure, self.contender, self.ranks, self.repeat, value, note)

    def outcome(self, result: Sample) -> str:
        if result.value is None:
            return result.note
        return f"{result.value / 2**20:.0f} MiB" if self.measure == "memory" else f"{result.value:.3f} s"


def measure(settings: Settings) -> Report:
    if not machine.installed("accelerate"):
        say("accelerate is not installed, so it is left out")
    described = machine.describe("accelerate")
    samples = take(list(plan(settings)))
    method = f"{settings.repeats} repeats, the contenders taking turns within each."
    return Report(
        "launch",
        "Start-up",
        described,
        settings,
        samples,
        method,
        table.tables(samples),
        lambda path, about: plot.draw(samples, path, about),
    )


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("launch", __doc__, repeats=5, timeout=120.0)
    parser.add_argument("--ranks", metavar="A,B", type=counts, default="1,2,4,8,16", help="default %(default)s")
    parser.add_argument("--memory-ranks", metavar="N", type=int, default=8, help="default %(default)s; 0: not measured")
    parser.add_argument(
        "--restart-ranks", metavar="N", type=int, default=4, help="at least 2, default %(default)s; 0: not measured"
    )
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.memory_ranks < 0:
        parser.error(f"--memory-ranks is {settings.memory_ranks}; give 0 or more")
    if settings.restart_ranks < 0 or settings.restart_ranks == 1:
        parser.error(f"--restart-ranks is {settings.restart_ranks}; give 0, or 2 or more, for rank 1 is killed")
    return settings


# ---- what is measured, and in which order


def plan(settings: Settings) -> Iterator[Step]:
    everyone = contenders.present()
    for contender in everyone:  # so that the first one does not pay for reading torch from the disk
        yield _step("warm-up", contender, settings.ranks[0], 0, 1, settings.timeout)
    for repeat in range(settings.repeats):
        turn = (repeat, settings.repeats, settings.timeout)
        for ranks in settings.ranks:
            for contender in everyone:
                yield _step("start", contender, ranks, *turn)
        if settings.memory_ranks:
            for contender in (FORK, EXEC, TORCHRUN):
                yield _step("memory", contender, settings.memory_ranks, *turn)
        if settings.restart_ranks:
            for contender in (FORK, TORCHRUN):
                yield _step("restart", contender, settings.restart_ranks, *turn)
    for repeat in range(_HELP_REPEATS):
        yield Step("help", HELP, 0, repeat, _HELP_REPEATS, lambda place: measures.phalanx_help(place, settings.timeout))


def _step(what: str, contender: Contender, ranks: int, repeat: int, repeats: int, timeout: float) -> Step:
    how = {"memory": measures.memory, "restart": measures.restart}.get(what, measures.start)
    return Step(what, contender.name, ranks, repeat, repeats, lambda place: how(contender, ranks, place, timeout))
