"""What the ranks of `phalanx bench collectives` run under MPI: the same all_reduce, in place, on numpy's arrays.

    collectives_mpi.py DIRECTORY

It is copied to a directory of its own and run there with mpirun, never imported.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path

import numpy

from phalanx.bench import numbers
from phalanx.bench.turns import Contender, Turns, calls_of

MPI = importlib.import_module("mpi4py.MPI")  # by name, for a type checker need not find what is an optional extra


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    comm = MPI.COMM_WORLD
    turns = Turns(comm.Barrier, comm.bcast, order["seconds"])
    for size in order["sizes"]:
        calls = calls_of(size, order)
        turns.measure("all_reduce", size, [_all_reduce(comm, calls, size)])
    turns.write(directory, comm.rank)


def _all_reduce(comm, calls: int, size: int) -> Contender:
    pattern = numbers.pattern(calls, size // 4)
    source = pattern * numpy.float32(numbers.weight(comm.rank))
    data = numpy.empty_like(source)
    expected = pattern * numpy.float32(numbers.weight_of_all(comm.size))
    return Contender(
        "MPI",
        [functools.partial(comm.Allreduce, MPI.IN_PLACE, [row, MPI.FLOAT], MPI.SUM) for row in data],
        functools.partial(numpy.copyto, data, source),
        functools.partial(numbers.check, data, expected, f"all_reduce of {size} bytes with MPI"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
