"""``phalanx bench``: measurements that can be repeated anywhere. Importing this imports nothing heavy."""

from __future__ import annotations

import importlib

from phalanx.errors import UsageError

_HELP = """\
phalanx bench: measurements that can be repeated anywhere.

benchmarks:
  phalanx bench launch [flags]        how fast jobs start and restart, and what they hold in memory,
                                      beside torchrun, mp.spawn and, where installed, accelerate
  phalanx bench collectives [flags]   how fast the collectives of backend shm are, beside gloo
                                      and, where installed, Open MPI

`phalanx bench launch --help` lists the flags of the first, and so on. The repository's benchmarks/ has more.
"""


def main(argv: list[str]) -> int:
    """Entry of ``phalanx bench``; returns the exit code."""
    if not argv or argv[0] in ("--help", "-h"):
        print(_HELP, end="")
        return 0
    if argv[0] not in ("launch", "collectives"):
        raise UsageError(f"there is no benchmark {argv[0]!r}; `phalanx bench --help` lists them.")
    from phalanx.bench.commands import run_until_interrupted

    benchmark = importlib.import_module(f"phalanx.bench.{argv[0]}").BENCHMARK
    settings = benchmark.parse(argv[1:])
    return run_until_interrupted(lambda: benchmark.run(settings))
