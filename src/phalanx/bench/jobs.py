"""Commands whose ranks measure something among themselves, and what their notes come to."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.bench import machine
from phalanx.bench.command import running
from phalanx.bench.contenders import FORK

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Series:
    """The times of one contender at one piece of work, in one job."""

    measure: str
    size: int
    """In bytes; 0 where there is none."""
    contender: str
    ranks: int
    repeat: int
    microseconds: tuple[float, ...]
    """Of each call in each turn, on the average of the turn."""


@dataclass(frozen=True)
class Job:
    """One command. Its ranks run ``script``, read in DIRECTORY/order.json what to measure, and leave their notes."""

    name: str
    script: str
    launcher: Callable[[int], contextlib.AbstractContextManager[list[str]]]
    ranks: int
    order: Mapping[str, Any]
    repeat: int
    repeats: int
    timeout: float

    def __str__(self) -> str:
        return f"{self.name}, {self.ranks} rank{'s' * (self.ranks > 1)}, repeat {self.repeat + 1} of {self.repeats}"

    def run(self, place: Path) -> list[Series]:
        (place / "order.json").write_text(json.dumps(self.order))
        with self.launcher(self.ranks) as argv:
            # Threads of a rank's own would take the cores from the other ranks. numpy asks the kernel for large pages,
            # which torch does not do.
            line = ["env", "OMP_NUM_THREADS=1", "NUMPY_MADVISE_HUGEPAGE=0", *argv, str(place / self.script), str(place)]
            with running(line, place, self.timeout) as command:
                command.finish()
                notes = [json.loads(path.read_text()) for path in sorted(place.glob("rank-*.json"))]
                if len(notes) != self.ranks:
                    raise command.failure(f"left notes of {len(notes)} ranks, not {self.ranks}")
        return merge(notes, self.ranks, self.repeat)

    def outcome(self, result: list[Series]) -> str:
        return f"{sum(len(series.microseconds) for series in result)} turns"


def merge(notes: Sequence[Sequence[Mapping[str, Any]]], ranks: int, repeat: int) -> list[Series]:
    """The notes of all ranks as one: a turn lasts from the first rank's start to the last one's end.

    The longest that a rank saw would not do. Of four ranks on two cores, two may begin when the others are done.
    """
    merged = []
    for entries in zip(*notes, strict=True):
        first = entries[0]
        turns = zip(*(entry["spans"] for entry in entries), strict=True)
        lasted = [max(end for _, end in turn) - min(start for start, _ in turn) for turn in turns]
        times = tuple(round(seconds / first["calls"] * 1e6, 2) for seconds in lasted)
        merged.append(Series(first["measure"], first["size"], first["contender"], ranks, repeat, times))
    return merged


@contextlib.contextmanager
def under_phalanx(ranks: int) -> Iterator[list[str]]:
    yield FORK.argv(ranks, [])


@contextlib.contextmanager
def under_mpi(ranks: int) -> Iterator[list[str]]:
    """Open MPI as it comes, but for the place of its files: when killed it leaves them in /dev/shm."""
    place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-", dir=place) as memory:
        # The name is btl_vader_… up to Open MPI 4 and btl_sm_… since 5; it ignores what it does not know.
        backing = [word for kind in ("vader", "sm") for word in ("--mca", f"btl_{kind}_backing_directory", memory)]
        ranks_of_any_number = ["--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
        # With -m mpi4py, one rank's exception ends the others too.
        yield ["mpirun", *ranks_of_any_number, *backing, sys.executable, "-m", "mpi4py"]


def mpi_version() -> str | None:
    """None when mpirun or mpi4py is missing."""
    if shutil.which("mpirun") is None or not machine.installed("mpi4py"):
        return None
    first, *_ = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return f"{first}, mpi4py {machine.version('mpi4py')}"
