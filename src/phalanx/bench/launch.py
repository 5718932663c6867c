"""How fast jobs start, restart, and what they hold in memory: phalanx beside torchrun, mp.spawn and accelerate.

Within a repeat the contenders take turns, so whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.bench import contenders, machine, measures, plot, table
from phalanx.bench.command import Interrupted, interruptible
from phalanx.bench.contenders import EXEC, FORK, TORCHRUN, Contender
from phalanx.bench.results import HELP, Sample
from phalanx.launch.flags import Parser

_HELP_REPEATS = 10


@dataclass(frozen=True)
class Settings:
    """The flags."""

    ranks: tuple[int, ...]
    repeats: int
    memory_ranks: int
    restart_ranks: int
    timeout: float
    out: Path


@dataclass(frozen=True)
class Step:
    """One command to measure."""

    measure: str
    contender: str
    ranks: int
    repeat: int
    repeats: int
    run: Callable[[Path], measures.Outcome]
    """Does it, in a directory of its own."""

    def __str__(self) -> str:
        ranks = f", {self.ranks} rank{'s' * (self.ranks > 1)}" if self.ranks else ""
        return f"{self.measure}, {self.contender}{ranks}, repeat {self.repeat + 1} of {self.repeats}"


def main(argv: list[str]) -> int:
    """Entry of ``phalanx bench launch``; returns the exit code."""
    settings = parse(argv)
    described = machine.describe()
    if not machine.installed("accelerate"):
        _say("accelerate is not installed, so it is left out")
    try:
        with interruptible():
            samples = measure(list(plan(settings)))
            text = table.tables(samples)
            print(f"{table.machine_list(described)}\n\n{text}")
            write(settings, described, samples, text)
    except Interrupted as interrupt:
        _say("interrupted; nothing was written, and nothing is left running")
        return 128 + interrupt.number
    return 0


def parse(argv: Sequence[str]) -> Settings:
    parser = Parser(prog="phalanx bench launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", metavar="A,B", type=_counts, default="1,2,4,8,16", help="default %(default)s")
    parser.add_argument("--repeats", metavar="N", type=_positive, default=5, help="default %(default)s")
    parser.add_argument("--memory-ranks", metavar="N", type=int, default=8, help="default %(default)s; 0: not measured")
    parser.add_argument(
        "--restart-ranks", metavar="N", type=int, default=4, help="at least 2, default %(default)s; 0: not measured"
    )
    parser.add_argument("--timeout", metavar="S", type=float, default=120.0, help="for one command, default 120")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("results"), help="default %(default)s")
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.memory_ranks < 0:
        parser.error(f"--memory-ranks is {settings.memory_ranks}; give 0 or more")
    if settings.restart_ranks < 0 or settings.restart_ranks == 1:
        parser.error(f"--restart-ranks is {settings.restart_ranks}; give 0, or 2 or more, for rank 1 is killed")
    return settings


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part) for part in text.split(",")}))


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


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


def measure(steps: Sequence[Step]) -> list[Sample]:
    """Takes the steps one after the other. A command that fails ends the benchmark."""
    samples = []
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        for number, step in enumerate(steps, 1):
            place = Path(scratch, str(number))
            place.mkdir()
            shutil.copy(Path(__file__).with_name("probe.py"), place)
            _say(f"{number}/{len(steps)} {step}", end=": ")
            try:
                value, note = step.run(place)
            except BaseException:
                print(file=sys.stderr)  # what is said next gets a line of its own
                raise
            print(_outcome(step.measure, value, note), file=sys.stderr)
            samples.append(Sample(step.measure, step.contender, step.ranks, step.repeat, value, note))
            shutil.rmtree(place)
    return samples


def _outcome(what: str, value: float | None, note: str) -> str:
    if value is None:
        return note
    return f"{value / 2**20:.0f} MiB" if what == "memory" else f"{value:.3f} s"


# ---- what is written


def write(settings: Settings, described: dict[str, str], samples: Sequence[Sample], text: str) -> None:
    """launch-DATE.json, .md and .png; those of the same day are replaced."""
    settings.out.mkdir(parents=True, exist_ok=True)
    day = described["date"].split()[0]
    stem = settings.out / f"launch-{day}"
    content = {
        "machine": described,
        "settings": {name: value for name, value in vars(settings).items() if name != "out"},
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    picture = stem.with_suffix(".png")
    try:
        plot.draw(samples, picture, f"{described['CPU']}, {described['cores']} cores, torch {described['torch']}")
        image = f"\n![seconds over ranks]({picture.name})\n"
    except ImportError:
        _say("matplotlib is not installed, so no plot is drawn; `pip install matplotlib` brings it")
        image = ""
    page = (
        f"# Start-up, {day}\n\n{table.machine_list(described)}\n\n"
        f"{settings.repeats} repeats, the contenders taking turns within each.\n\n{text}\n{image}"
    )
    stem.with_suffix(".md").write_text(page)
    _say(f"written: {stem}.json, .md" + (", .png" if image else ""))


def _say(text: str, end: str = "\n") -> None:
    print(f"bench: {text}", end=end, file=sys.stderr, flush=True)
