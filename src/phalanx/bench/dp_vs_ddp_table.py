"""What the series of `phalanx bench dp-vs-ddp` come to."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.bench.jobs import Series
from phalanx.bench.report import grid
from phalanx.bench.rows import Row, rows
from phalanx.bench.summary import Summary

ONE, ALL, DP, DP_SHARED, DDP, DDP_GLOO = "one thread", "all threads", "dp", "dp, cores shared", "ddp shm", "ddp gloo"
PARTS = ("scatter", "replicate", "forward", "gather", "backward", "optimizer")
_MILLI = 1e3
"""µs in a ms."""

_WHY = """\
DP copies the whole model at every step (replicate), before anything is computed. Its threads share one interpreter, so
whatever Python does in forward is done by one at a time; only the arithmetic inside torch overlaps. On CPUs the
backward pass of all replicas runs in the thread that calls it, one after the other, and the optimizer works in one
process for all. DDP copies once, at the start; its processes share nothing but the gradients."""


def tables(series: Sequence[Series], replicas: int) -> str:
    found = rows(series)
    whole = [row for row in found if row.ranks == replicas]
    parts = [row for row in found if row.ranks == 1]
    return "\n\n".join([_steps(whole, replicas), _parts(parts)])


def _steps(found: Sequence[Row], replicas: int) -> str:
    header = ["model", "parameters, MB", "one process, 1 thread, ms", "all threads, ms"]
    header += [f"DP, {replicas} replicas, ms", "its threads sharing the cores, ms"]
    header += [f"DDP, {replicas} ranks, shm, ms", "gloo, ms", "DP/DDP", "1 thread/DDP", "1 thread/DP"]
    body = []
    for row in found:
        times = [row.times[name].show(_MILLI, 1) for name in (ONE, ALL, DP, DP_SHARED, DDP, DDP_GLOO)]
        ratios = [_ratio(row, over, under) for over, under in (((DP, DP_SHARED), (DDP,)), ((ONE,), (DDP,)))]
        body.append([row.measure, f"{row.size / 2**20:.1f}", *times, *ratios, _ratio(row, (ONE,), (DP, DP_SHARED))])
    words = "DP in the ratios is the faster of its two, repeat by repeat."
    return "\n".join(["## A training step", "", words, "", *grid([header, *body])])


def _ratio(row: Row, over: Sequence[str], under: Sequence[str]) -> str:
    """Of the fastest of each, in each repeat."""
    medians = row.repeats

    def best(names: Sequence[str], repeat: int) -> float:
        return min(medians[name][repeat] for name in names)

    found = Summary.of([best(over, repeat) / best(under, repeat) for repeat in medians[ONE]])
    return found.show() if found else ""


def _parts(found: Sequence[Row]) -> str:
    header = ["model", "", *(f"{part}, ms" for part in PARTS), "together, ms"]
    body = []
    for row in found:
        model, _, kind = row.measure.partition(": ")
        times = [row.times.get(part) for part in PARTS]
        total = sum(time.median for time in times if time)
        body.append([model, kind, *(time.show(_MILLI, 2) if time else "" for time in times), f"{total / _MILLI:.2f}"])
    return "\n".join(["## Where DP's time goes", "", _WHY, "", *grid([header, *body])])
