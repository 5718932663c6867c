"""How fast collectives of one machine are: shm beside gloo and, where installed, Open MPI.

shm and gloo take turns in the same processes, and jobs of torch and of MPI take turns within a repeat, so whatever else
the machine does hits all of them alike. Every turn's result is checked; a wrong number ends the benchmark. A turn is a
barrier and one call; below 1 MB, up to 100 calls back to back, of 4 MB together, whose time is divided by their number.
The size of all_gather is that of its output, of reduce_scatter that of its input.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence

from phalanx.bench import common
from phalanx.bench.commands import Settings, Step, job, mpi_version, report_progress
from phalanx.bench.common import Benchmark, Flag, Row, compare
from phalanx.errors import UsageError

SHM, GLOO, MPI, LIMIT = "shm", "gloo", "MPI", "a += b"
OTHERS = ("broadcast", "all_gather", "reduce_scatter", "all_to_all")
MOST_RANKS = 16
SCRIPT = ("-m", "phalanx.bench.ranks")


def plan(settings: Settings) -> Iterator[Step]:
    if settings.ranks[-1] > MOST_RANKS:
        have = f"--ranks has {settings.ranks[-1]}"
        raise UsageError(f"{have}; the results of more than {MOST_RANKS} cannot be checked exactly, so give fewer.")
    with_mpi = bool(mpi_version())
    if not with_mpi:
        report_progress("mpirun or mpi4py is not installed, so MPI is left out")
    order = {"sizes": settings.sizes, "limit": settings.sizes[-1], "seconds": settings.seconds}
    order |= {"others": OTHERS, "other_size": settings.other_size}
    smallest = {**order, "sizes": settings.sizes[:1], "limit": 0, "others": ()}
    for repeat in range(settings.repeats):
        turn = (repeat, settings)
        for ranks in settings.ranks:
            yield job("shm and gloo", SCRIPT, ranks, order, turn)
            if with_mpi:
                yield job("MPI", SCRIPT, ranks, {**order, "mpi": True}, turn, mpirun)
        yield job("shm and gloo", SCRIPT, 1, smallest, turn)


@contextlib.contextmanager
def mpirun(ranks: int) -> Iterator[list[str]]:
    """Open MPI as it comes, but for the directory of its files: when killed it leaves them in /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-", dir="/dev/shm") as memory:
        # The name is btl_vader_… up to Open MPI 4 and btl_sm_… since 5; it ignores what it does not know.
        backing = [word for kind in ("vader", "sm") for word in ("--mca", f"btl_{kind}_backing_directory", memory)]
        flags = ["--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *backing]
        yield ["mpirun", *flags, sys.executable, "-m", "mpi4py"]  # with it one rank's exception ends the others too


def tables(rows: Sequence[Row], _: Settings) -> list[str]:
    reduces = [row for row in rows if row.measure == "all_reduce"]
    several = [row for row in reduces if row.ranks > 1]
    with_limit = [row for row in several if LIMIT in row.samples]
    alone = [row for row in reduces if row.ranks == 1]
    others = [row for row in rows if row.measure in OTHERS]
    beside_gloo = [(GLOO, SHM)]
    return [
        compare("all_reduce of float32", several, (GLOO, SHM, MPI), [*beside_gloo, (MPI, SHM)], unit="µs"),
        compare("The limit: `a += b` on all ranks at once", with_limit, (SHM, LIMIT), [(SHM, LIMIT)], unit="µs"),
        compare("Other collectives of float32", others, (GLOO, SHM), beside_gloo, unit="µs"),
        compare("The call itself: all_reduce in a world of one", alone, (GLOO, SHM), unit="µs"),
    ]


FLAGS = (
    Flag("--ranks", "A,B", common.counts, "2,4"),
    Flag("--sizes", "A,B", common.sizes, "4,256,1K,4K,16K,64K,256K,1M,4M,16M,25M,64M,256M", "of all_reduce"),
    Flag("--other-size", "A", common.size, "25M", "of the other collectives"),
    Flag("--seconds", "S", common.seconds, 0.3, "for one collective of one size in one job, about"),
)
BENCHMARK = Benchmark("collectives", __doc__, plan, tables, FLAGS, repeats=4, timeout=300.0)
