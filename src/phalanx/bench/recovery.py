"""How long a run is away when a rank is killed: from the SIGKILL to the next step that is finished.

A small model is trained with DDP and saved every few steps. phalanx, with px.Checkpointer, beside torchrun, with the
same script and torch.save; and phalanx with that script as it is.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.bench import machine, measures, recovery_notes
from phalanx.bench.arguments import CommonSettings, counts, new_parser, positive
from phalanx.bench.command import running
from phalanx.bench.contenders import FORK, TORCHRUN, Contender
from phalanx.bench.recovery_notes import Losses, Plan, Recovery
from phalanx.bench.recovery_table import tables
from phalanx.bench.report import Report
from phalanx.bench.steps import take


@dataclass(frozen=True)
class Way:
    """One way to be back after a fault."""

    launcher: Contender
    saves: str
    """With what the script saves and loads."""
    flags: tuple[str, ...] = ()


WAYS = {
    "phalanx": Way(FORK, "px.Checkpointer"),
    "phalanx-preload": Way(FORK, "px.Checkpointer", ("--preload", "phalanx.checkpoint.checkpointer")),
    "phalanx-torch-save": Way(FORK, "torch.save"),
    TORCHRUN.name: Way(TORCHRUN, "torch.save"),
}

_METHOD = """\
{repeats} repeats, the contenders taking turns within each. An MLP of {megabytes:.1f} MB is trained with momentum for
{plan.steps} steps and saved every {plan.every}; after step {plan.killed_after} of the first attempt rank 1 kills itself
(SIGKILL), when the save of step {plan.last_saved} is whole. The clock stops when rank 0 has finished its first step of
the second attempt. phalanx saves with px.Checkpointer; phalanx-preload is the same with `--preload
phalanx.checkpoint.checkpointer`; torchrun and phalanx-torch-save run one script with torch.save on rank 0, written
aside, synced and renamed. Each rank has one thread. Every run has to go on from the last saved step, with the losses of
an uninterrupted run of one process on the same samples. With torch 2.13 a restart under torchrun may fail: it is then
tried again, {tries} times in all, and the failures are counted."""


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Its own flags."""

    ranks: tuple[int, ...]
    contenders: tuple[str, ...]
    tries: int
    width: int


def measure(settings: Settings) -> Report:
    described = machine.describe()
    samples = [sample for found in take(list(plan(settings))) for sample in found]
    example = Plan(settings.ranks[0], settings.width)
    megabytes = 4 * (2 * settings.width * (settings.width + 1) + settings.width + 1) / 1e6
    method = _METHOD.format(repeats=settings.repeats, plan=example, megabytes=megabytes, tries=settings.tries)
    return Report("recovery", "Going on after a fault", described, settings, samples, method, tables(samples))


def parse(argv: Sequence[str]) -> Settings:
    parser = new_parser("recovery", __doc__, repeats=5, timeout=120.0)
    parser.add_argument(
        "--ranks", metavar="A,B", type=counts, default="2,4", help="each at least 2; default %(default)s"
    )
    parser.add_argument("--contenders", metavar="A,B", default=",".join(WAYS), help="default %(default)s")
    parser.add_argument(
        "--tries", metavar="N", type=positive, default=3, help="of a restart that fails; default %(default)s"
    )
    parser.add_argument("--width", metavar="N", type=positive, default=512, help="of the model; default %(default)s")
    arguments = parser.parse_args(argv)
    arguments.contenders = tuple(arguments.contenders.split(","))
    if arguments.ranks[0] < 2:
        parser.error(f"--ranks has {arguments.ranks[0]}; give 2 or more, for rank 1 is killed")
    if unknown := [name for name in arguments.contenders if name not in WAYS]:
        parser.error(f"--contenders has {unknown[0]!r}; there are {', '.join(WAYS)}")
    return Settings(**vars(arguments))


# ---- what is measured, and in which order


def plan(settings: Settings) -> Iterator[Reference | Killed]:
    references: dict[int, Losses] = {}
    for ranks in settings.ranks:
        yield Reference(Plan(ranks, settings.width), references, settings.timeout)
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            for name in settings.contenders:
                yield Killed(name, Plan(ranks, settings.width), references, repeat, settings)


@dataclass(frozen=True)
class Reference:
    """The run to which nothing happens, in one process."""

    plan: Plan
    references: dict[int, Losses]
    """Where its losses go, by the number of ranks."""
    timeout: float
    script: str = "recovery_rank.py"

    def __str__(self) -> str:
        return f"uninterrupted, on the samples of {self.plan.ranks} ranks"

    def run(self, place: Path) -> list[Recovery]:
        order = _ordered(place / self.script, place, self.plan, "nothing")
        with running([sys.executable, *order], place, self.timeout) as command:
            command.finish()
        self.references[self.plan.ranks] = recovery_notes.losses(recovery_notes.read(place), 0)
        return []

    def outcome(self, result: list[Recovery]) -> str:
        return f"{len(self.references[self.plan.ranks])} steps"


@dataclass(frozen=True)
class Killed:
    """One contender, of which a rank is killed; tried again when it is torchrun and the restart fails."""

    contender: str
    plan: Plan
    references: dict[int, Losses]
    repeat: int
    settings: Settings
    script: str = "recovery_rank.py"

    def __str__(self) -> str:
        return f"{self.contender}, {self.plan.ranks} ranks, repeat {self.repeat + 1} of {self.settings.repeats}"

    def run(self, place: Path) -> list[Recovery]:
        found = []
        for number in range(self.settings.tries):
            directory = place / f"try-{number}"
            directory.mkdir()
            found.append(self._try(directory, place / self.script))
            if found[-1].value is not None:
                break
        return found

    def outcome(self, result: list[Recovery]) -> str:
        return ", ".join(sample.note if sample.value is None else f"{sample.value:.3f} s" for sample in result)

    def _try(self, directory: Path, script: Path) -> Recovery:
        way = WAYS[self.contender]
        order = _ordered(script, directory, self.plan, way.saves)
        argv = way.launcher.argv(self.plan.ranks, order, ["--max-restarts", "1", *way.flags])
        sample = Recovery("recovery", self.contender, self.plan.ranks, self.repeat, None)
        timeout = measures.restart_timeout(way.launcher, self.settings.timeout)
        # Threads of a rank's own would take the cores from the other ranks.
        with running(["env", "OMP_NUM_THREADS=1", *argv], directory, timeout) as command:
            failure = measures.finish_restart(way.launcher, command)
            notes = recovery_notes.read(directory)
            if failure and not recovery_notes.was_killed(notes):
                raise command.failure(f"{failure}, before there was anything to recover from")
            phases = recovery_notes.phases(notes, recovery_notes.read_agent(directory))
            if failure:
                return dataclasses.replace(sample, note=failure, phases=phases)
            if wrong := recovery_notes.problem(notes, self.plan, self.references[self.plan.ranks]):
                raise command.failure(wrong)
        return dataclasses.replace(sample, value=sum(phases.values()), phases=phases)


def _ordered(script: Path, directory: Path, plan: Plan, saves: str) -> list[str]:
    """The script and its argument, with the order where it looks for it."""
    (directory / "order.json").write_text(json.dumps({"saves": saves, **dataclasses.asdict(plan)}))
    return [str(script), str(directory)]
