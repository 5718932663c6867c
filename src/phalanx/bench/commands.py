"""The commands that are measured: one at a time, in a directory of its own, ended with all it has started."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.launch.process import process_tree
from phalanx.system import cgroups

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOWN_LINES = 40  # torchrun prints twenty about itself, after the traceback


Settings = argparse.Namespace  # the values of a benchmark's flags
Turn = tuple[int, Settings]
Launcher = Callable[[int], contextlib.AbstractContextManager[list[str]]]


@dataclass(frozen=True)
class Sample:
    """The times of one contender for one piece of work, in one repeat."""

    measure: str
    contender: str
    ranks: int
    repeat: int
    values: tuple[float, ...]
    """Seconds, bytes or indices a second, as the measure is; empty when the contender cannot do this."""
    size: int = 0
    note: str = ""  # why there is no value, or something to know about it


@dataclass(frozen=True)
class Step:
    """One command to measure, in a directory of its own."""

    label: str
    run: Callable[[Path], Sequence[Sample]]


def report_progress(text: str, end: str = "\n") -> None:
    print(f"bench: {text}", end=end, file=sys.stderr, flush=True)


def take(steps: Sequence[Step]) -> list[Sample]:
    """Runs the steps in order. A command that fails ends the benchmark."""
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        for number, step in enumerate(steps, 1):
            directory = Path(scratch, str(number))
            directory.mkdir()
            report_progress(f"{number}/{len(steps)} {step.label}", end=": ")
            try:
                found = step.run(directory)
            except BaseException:
                print(file=sys.stderr)  # what is printed next gets a line of its own
                raise
            print(_outcome(found), file=sys.stderr)
            samples += found
            shutil.rmtree(directory)
    return samples


def _outcome(samples: Sequence[Sample]) -> str:
    values = [f"{value:.4g}" for sample in samples for value in sample.values]
    more = ["…"] if len(values) > 2 else []
    return ", ".join([*values[:2], *more, *(sample.note for sample in samples if sample.note)])


def run_until_interrupted(work: Callable[[], None]) -> int:
    """Returns the exit code. The first signal ends the benchmark; later ones are ignored, so that it cleans up."""

    def stop(number: int, _: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        work()
    except KeyboardInterrupt as interrupt:
        report_progress("interrupted; nothing was written, and nothing is left running")
        return 128 + interrupt.args[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


class CommandFailed(PhalanxError):
    """A measured command failed; the message ends with the last lines it printed."""

    def __init__(self, command: str, how: str, output: str) -> None:
        super().__init__(f"`{command}` {how}. It printed at the end:{output}")
        self.how = how


@contextlib.contextmanager
def running(argv: Sequence[str], directory: Path, timeout: float) -> Iterator[Running]:
    """Starts ``argv`` in ``directory``; at the end of the block nothing of it is left.

    Launchers put their workers into sessions of their own, so a process group is not enough to find them. This
    process adopts them if their parents die, which keeps all of them below it.
    """
    process_tree.adopt_orphans()
    others = _below()
    try:
        yield Running(argv, directory, timeout, others)
    finally:
        process_tree.end_all(lambda: _below() - others)


def _below() -> frozenset[int]:
    """Every process below this one, zombies too: one of several threads becomes a zombie while it still has children,
    which would be missed without it."""
    import psutil

    return frozenset(process.pid for process in psutil.Process().children(recursive=True))


class Running:
    """A command that runs. Its output goes into a file, of which the end is shown if it fails."""

    def __init__(self, argv: Sequence[str], directory: Path, timeout: float, others: frozenset[int]) -> None:
        self._argv, self._timeout, self._others = argv, timeout, others
        self._output = directory / "output"
        with self._output.open("wb") as output:
            self.started = time.time()
            self._process = subprocess.Popen(
                argv,
                cwd=directory,
                env={**os.environ, "TMPDIR": str(directory)},  # what launchers leave in /tmp is removed as well
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C on the terminal is for the benchmark alone
            )

    def finish(self) -> float:
        """Waits for the end and returns the seconds from start to end; a bad end raises CommandFailed."""
        self._wait(None)
        lasted = time.time() - self.started
        if code := self._process.wait():
            raise self.failure(
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
        return lasted

    def read(self, fd: int, count: int) -> None:
        """Reads ``count`` bytes from a FIFO that the ranks write to."""
        while count:
            if not self._wait(fd):
                raise self.failure(f"ended with exit code {self._process.wait()} while {count} ranks were awaited")
            count -= len(os.read(fd, count))

    def pss(self) -> tuple[int, int]:
        """The command's proportional share of memory (PSS) in bytes, and the number of its processes.

        A page of libtorch that other processes have mapped too counts only in part: run nothing else with torch.
        """
        import psutil

        pids, total = _below() - self._others, 0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie holds no memory
                total += psutil.Process(pid).memory_full_info().pss
        return total, len(pids)

    def failure(self, how: str) -> CommandFailed:
        lines = self._output.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        shown = "".join(f"\n  | {line}" for line in lines) if lines else " nothing."
        return CommandFailed(" ".join(self._argv), how, shown)

    def _wait(self, fd: int | None) -> bool:
        """Until ``fd`` can be read (true) or the command has ended (false); too long raises CommandFailed."""
        # Popen.wait with a timeout polls, with pauses of up to 50 ms; this wakes up at once.
        pidfd = os.pidfd_open(self._process.pid)
        try:
            left = max(0.0, self.started + self._timeout - time.time())
            readable, _, _ = select.select([pidfd] if fd is None else [pidfd, fd], [], [], left)
        finally:
            os.close(pidfd)
        if not readable:
            raise self.failure(f"was still running after {self._timeout:g} s")
        return fd in readable


@contextlib.contextmanager
def phalanx_run(ranks: int) -> Iterator[list[str]]:
    """The command that starts so many ranks; the script comes after it."""
    yield [sys.executable, "-m", "phalanx", "run", "--start-method", "fork", "--nproc-per-node", str(ranks)]


def job(
    name: str,
    script: Sequence[str],
    ranks: int,
    order: Mapping[str, object],
    turn: Turn,
    launcher: Launcher = phalanx_run,
) -> Step:
    """The ranks run ``script``, read in DIRECTORY/order.json what to measure, and leave their times. ``turn`` is the
    number of the repeat, with the settings."""
    repeat, settings = turn

    def run(directory: Path) -> list[Sample]:
        (directory / "order.json").write_text(json.dumps(order))
        with launcher(ranks) as argv:
            # Threads of a rank's own would take the cores from the other ranks. numpy asks the kernel for large pages,
            # which torch does not do.
            line = ["env", "OMP_NUM_THREADS=1", "NUMPY_MADVISE_HUGEPAGE=0", *argv, *script, str(directory)]
            with running(line, directory, settings.timeout) as command:
                command.finish()
                notes = [json.loads(path.read_text()) for path in sorted(directory.glob("rank-*.json"))]
                if len(notes) != ranks:
                    raise command.failure(f"left the times of {len(notes)} ranks, not {ranks}")
        return merge(notes, repeat)

    return Step(f"{name}, {ranks} rank{'s' * (ranks > 1)}, repeat {repeat + 1} of {settings.repeats}", run)


def merge(notes: Sequence[Sequence[Mapping[str, Any]]], repeat: int) -> list[Sample]:
    """The times of all ranks as one: a turn lasts from the first rank's start to the last one's end.

    The longest that a rank saw would not do. Of four ranks on two cores, two may begin when the others are done.
    """
    merged = []
    for entries in zip(*notes, strict=True):
        first = entries[0]
        turns = zip(*(entry["spans"] for entry in entries), strict=True)
        lasted = [max(end for _, end in turn) - min(start for start, _ in turn) for turn in turns]
        values = tuple(round(seconds / first["calls"], 9) for seconds in lasted)
        merged.append(Sample(first["measure"], first["contender"], len(notes), repeat, values, first["size"]))
    return merged


def describe() -> dict[str, str]:
    """The facts that one needs to compare figures. Versions come from metadata: no package is imported."""
    import psutil

    cpuinfo = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    packages = ("torch", "phalanx", "numpy", "accelerate", "torchdata")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "CPU": found[1] if found else platform.processor() or "unknown",
        "cores": f"{cgroups.usable_cores()} usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load at the start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: metadata.version(name) if installed(name) else "not installed" for name in packages},
        "MPI": mpi_version() or "not installed",
    }


def installed(package: str) -> bool:
    return util.find_spec(package) is not None


def mpi_version() -> str:
    """Empty when mpirun or mpi4py is missing."""
    if shutil.which("mpirun") is None or not installed("mpi4py"):
        return ""
    answer = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    return f"{answer.partition(chr(10))[0]}, mpi4py {metadata.version('mpi4py')}"
