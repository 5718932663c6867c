"""Benchmarks: ``phalanx bench …``. Importing this imports nothing heavy; plots need matplotlib, tables do not."""

from __future__ import annotations

import importlib
from typing import Any

from phalanx.errors import UsageError

_HELP = """\
phalanx bench: measurements that can be repeated anywhere.

benchmarks:
  phalanx bench launch [flags]        how fast jobs start and restart, and what they hold in memory,
                                      beside torchrun, mp.spawn and, where installed, accelerate
  phalanx bench collectives [flags]   how fast the collectives of backend shm are, beside gloo
                                      and, where installed, Open MPI
  phalanx bench ddp-step [flags]      what communication adds to a training step with DDP,
                                      through shm and through gloo
  phalanx bench nodes [flags]         how fast shm is over two (virtual) nodes, beside flat gloo,
                                      with links of several bandwidths
  phalanx bench sampler [flags]       how fast ShardSampler begins and goes through an epoch, and what it
                                      holds in memory, beside torch's and, where installed, torchdata's
  phalanx bench dp-vs-ddp [flags]     how fast one process with replicas in threads is, beside
                                      one process for each replica, and where its time goes
  phalanx bench checkpoint [flags]    how long a checkpoint holds training up, and until it is on the disk,
                                      beside torch.save and torch.distributed.checkpoint
  phalanx bench recovery [flags]      how long a run is away when a rank is killed, from the kill to the next
                                      finished step, beside torchrun with torch.save
  phalanx bench track [flags]         what px.track and px.log add to a training step
  phalanx bench recorder [flags]      what the status page of each rank adds to a collective and to a training step

`phalanx bench launch --help` lists the flags of the first, and so on.
"""
_BENCHMARKS = {
    "launch": "launch",
    "collectives": "collectives",
    "ddp-step": "ddp_step",
    "nodes": "nodes",
    "sampler": "sampler",
    "dp-vs-ddp": "dp_vs_ddp",
    "checkpoint": "checkpoint",
    "recovery": "recovery",
    "track": "track",
    "recorder": "recorder",
}


def main(argv: list[str]) -> int:
    """Entry of ``phalanx bench``; returns the exit code."""
    if not argv or argv[0] in ("--help", "-h"):
        print(_HELP, end="")
        return 0
    if argv[0] not in _BENCHMARKS:
        raise UsageError(f"there is no benchmark {argv[0]!r}; `phalanx bench --help` lists them.")
    return _run(importlib.import_module(f"phalanx.bench.{_BENCHMARKS[argv[0]]}"), argv[1:])


def _run(benchmark: Any, argv: list[str]) -> int:
    """Each is a module with `parse`, from flags to settings, and `measure`, from settings to a report."""
    from phalanx.bench.report import until_interrupted

    settings = benchmark.parse(argv)

    def measure_and_write() -> None:
        report = benchmark.measure(settings)
        report.print()
        report.write(settings.out)

    return until_interrupted(measure_and_write)
