"""How fast jobs start, restart, and what they hold in memory: phalanx beside torchrun, mp.spawn and accelerate.

Within a repeat the contenders take turns, so whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.bench.commands import CommandFailed, Running, Sample, Settings, Step, installed, report_progress, running
from phalanx.bench.common import Benchmark, Flag, Row, by_contender, count, counts
from phalanx.errors import UsageError

FORK, EXEC, TORCHRUN = "phalanx fork", "phalanx exec", "torchrun"
MP_SPAWN, ACCELERATE, HELP = "mp.spawn", "accelerate launch", "phalanx --help"
RESTART_TIMEOUTS = {TORCHRUN: 30.0}  # some of its restarts hang
_HELP_REPEATS = 10

_TITLES = {
    "start": "Start, seconds: from the command to a barrier passed on all ranks",
    "memory": "Memory, MiB, while all ranks wait after the barrier: PSS of all processes, the launcher's included",
    "restart": "Restart, seconds: from the SIGKILL of one rank to the first all_reduce of the next attempt",
    "help": "The command without work, seconds",
}


def command(contender: str, ranks: int) -> list[str]:
    """The launcher and its flags, as a user would type them; the script comes after them."""
    run = ["phalanx", "run", "--nproc-per-node", str(ranks), "--start-method"]
    # accelerate's --cpu starts one process whatever the number; --multi_gpu starts all, GPUs or not, but refuses 1.
    quiet = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    many = ["--multi_gpu"] * (ranks > 1)
    modules = {
        FORK: [*run, "fork"],
        EXEC: [*run, "exec"],
        TORCHRUN: ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)],
        ACCELERATE: ["accelerate.commands.launch", *many, *quiet, "--num_processes", str(ranks)],
    }
    return [sys.executable, *(["-m", *modules[contender]] if contender in modules else [])]


def finish_restart(contender: str, command: Running) -> str:
    """Waits for the end of a command that restarts; returns how it failed, if it is torchrun and did."""
    try:
        command.finish()
    except CommandFailed as error:
        if contender != TORCHRUN:
            raise
        # The store still has the addresses of the first attempt. A rank that reads one before it is written anew
        # connects to nobody: with torch 2.13 some restarts work, some end with an error, and some hang.
        return f"fails: {error.how}"
    return ""


Outcome = tuple[float | None, str]
Measure = Callable[[str, int, Path, float], Outcome]


def _start(contender: str, ranks: int, directory: Path, timeout: float) -> Outcome:
    """Seconds from the command to the moment when the last rank has passed the barrier."""
    mode = "spawn" if contender == MP_SPAWN else "up"
    with running([*command(contender, ranks), *_probe(directory, mode, ranks)], directory, timeout) as launched:
        launched.finish()
        notes = _notes(directory)
        if len(notes) != ranks or any(note["world_size"] != ranks for note in notes):
            short = "starts one process" if len(notes) == 1 else f"starts {len(notes)} ranks instead of {ranks}"
            if contender != ACCELERATE:
                raise launched.failure(short)
            return None, short
    return max(note["time"] for note in notes) - launched.started, ""


def _memory(contender: str, ranks: int, directory: Path, timeout: float) -> Outcome:
    """MiB of PSS while all ranks wait."""
    argv = [*command(contender, ranks), *_probe(directory, "hold", ranks)]
    with (
        _fifo(directory / "ready") as ready,
        _fifo(directory / "go") as go,
        running(argv, directory, timeout) as launched,
    ):
        launched.read(ready.fileno(), ranks)
        held, processes = launched.pss()
        go.close()  # the ranks wait until nobody can write to it any more
        launched.finish()
    return held / 2**20, f"{processes} processes"


def _restart(contender: str, ranks: int, directory: Path, timeout: float) -> Outcome:
    """Seconds from the death of rank 1 to the moment when the last rank of the next attempt has reduced."""
    argv = [*command(contender, ranks), "--max-restarts", "1", *_probe(directory, "restart", ranks)]
    with running(argv, directory, min(timeout, RESTART_TIMEOUTS.get(contender, timeout))) as launched:
        if failure := finish_restart(contender, launched):
            return None, failure
        times: dict[int, list[float]] = {0: [], 1: []}
        for note in _notes(directory):
            times[note["attempt"]].append(note["time"])
        if (len(times[0]), len(times[1])) != (1, ranks):
            raise launched.failure(f"had {len(times[0])} rank(s) killed and {len(times[1])} of {ranks} back")
    return max(times[1]) - times[0][0], ""


def _help(_: str, __: int, directory: Path, timeout: float) -> Outcome:
    with running([sys.executable, "-m", "phalanx", "--help"], directory, timeout) as launched:
        return launched.finish(), ""


def _probe(directory: Path, mode: str, ranks: int) -> list[str]:
    """Copied, so that nothing beside it can be imported."""
    script = shutil.copy(Path(__file__).with_name("probe.py"), directory)
    return [str(script), str(directory), mode, str(ranks)]


def _fifo(path: Path) -> BinaryIO:
    os.mkfifo(path)
    return path.open("r+b", buffering=0)  # for reading and writing, or opening it would wait for the other side


def _notes(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in directory.glob("rank-*.jsonl") for line in path.read_text().splitlines()]


def plan(settings: Settings) -> Iterator[Step]:
    if settings.restart_ranks == 1:
        raise UsageError("--restart-ranks is 1; give 0, or 2 or more, for rank 1 is killed.")
    everyone = [FORK, EXEC, TORCHRUN, MP_SPAWN]
    if installed("accelerate"):
        everyone.append(ACCELERATE)
    else:
        report_progress("accelerate is not installed, so it is left out")

    def steps(measure: str, how: Measure, contenders: Sequence[str], ranks: int, repeat: int) -> Iterator[Step]:
        for contender in contenders:
            words = f"{measure}, {contender}" + (f", {ranks} rank{'s' * (ranks > 1)}" if ranks else "")
            run = functools.partial(_sample, how, measure, contender, ranks, repeat, settings.timeout)
            yield Step(f"{words}, repeat {repeat + 1}", run)

    # Warm-up, so that the first one does not pay for reading torch from the disk.
    yield from steps("warm-up", _start, everyone, settings.ranks[0], 0)
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            yield from steps("start", _start, everyone, ranks, repeat)
        if settings.memory_ranks:
            yield from steps("memory", _memory, (FORK, EXEC, TORCHRUN), settings.memory_ranks, repeat)
        if settings.restart_ranks:
            yield from steps("restart", _restart, (FORK, TORCHRUN), settings.restart_ranks, repeat)
    for repeat in range(_HELP_REPEATS):
        yield from steps("help", _help, (HELP,), 0, repeat)


def _sample(
    how: Measure, measure: str, contender: str, ranks: int, repeat: int, timeout: float, directory: Path
) -> list[Sample]:
    value, note = how(contender, ranks, directory, timeout)
    return [Sample(measure, contender, ranks, repeat, () if value is None else (value,), note=note)]


def tables(rows: Sequence[Row], _: Settings) -> list[str]:
    return [by_contender(title, rows, measure, TORCHRUN) for measure, title in _TITLES.items()]


FLAGS = (
    Flag("--ranks", "A,B", counts, "1,2,4,8,16"),
    Flag("--memory-ranks", "N", count, 8, "0: not measured"),
    Flag("--restart-ranks", "N", count, 4, "at least 2; 0: not measured"),
)
BENCHMARK = Benchmark("launch", __doc__, plan, tables, FLAGS, repeats=5)
