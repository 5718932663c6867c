"""Benchmarks: ``phalanx bench launch``. Importing this imports nothing heavy; plots need matplotlib, tables do not."""

from __future__ import annotations

from phalanx.errors import UsageError

_HELP = """\
phalanx bench: measurements that can be repeated anywhere.

benchmarks:
  phalanx bench launch [flags]      how fast jobs start and restart, and what they hold in memory,
                                    beside torchrun, mp.spawn and, where installed, accelerate

`phalanx bench launch --help` lists the flags.
"""


def main(argv: list[str]) -> int:
    """Entry of ``phalanx bench``; returns the exit code."""
    if not argv or argv[0] in ("--help", "-h"):
        print(_HELP, end="")
        return 0
    if argv[0] != "launch":
        raise UsageError(f"there is no benchmark {argv[0]!r}; `phalanx bench --help` lists them.")
    from phalanx.bench import launch

    return launch.main(argv[1:])
