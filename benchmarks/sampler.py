"""How fast samplers give their first index and a whole epoch, and what they hold in memory: ShardSampler beside
torch's DistributedSampler and, where installed, torchdata's StatefulDistributedSampler.

Each figure is taken in a process of its own, from the constructor on, and within a repeat the samplers take turns.
Memory is how far the process's peak grew while the first 100,000 indices were taken; traced is the part that Python
and numpy allocated, by tracemalloc. An epoch is one rank's, to its last index.
"""

import collections
import functools
import importlib
import itertools
import json
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common import main, read_order

from phalanx.bench.commands import Sample, Settings, Step, installed, report_progress, running
from phalanx.bench.common import MILLI, Benchmark, Flag, Row, by_contender, count, counts, positive, several

OURS, TORCH, TORCHDATA = "ShardSampler", "DistributedSampler", "StatefulDistributedSampler"
HOMES = {OURS: "phalanx.data.sampler", TORCH: "torch.utils.data", TORCHDATA: "torchdata.stateful_dataloader.sampler"}
BYTES = 48  # that DistributedSampler takes for each sample at its peak: a Python int, and its places in two lists
TAKEN = 100_000  # indices that are taken while memory is measured: enough for blocks to have grown to their full size


def length(text: str) -> int:
    """A whole number, 1e6 as well."""
    number, mark, zeros = text.strip().partition("e")
    return positive(number) * 10 ** count(zeros if mark else "0")


lengths = several(length)


def plan(settings: Settings) -> Iterator[Step]:
    contenders = [OURS, TORCH, *([TORCHDATA] if installed("torchdata") else [])]
    if TORCHDATA not in contenders:
        report_progress("torchdata is not installed, so it is left out")
    pieces = [("first", each, 1) for each in settings.lengths]
    pieces += [("epoch", each, ranks) for each in settings.epoch_lengths for ranks in settings.ranks]
    for repeat in range(settings.repeats):
        for measure, size, ranks in pieces:
            for name in contenders:
                words = f"{measure}, {name}, {size} samples, {ranks} rank{'s' * (ranks > 1)}"
                words += f", repeat {repeat + 1} of {settings.repeats}"
                yield Step(words, functools.partial(_take, settings, measure, name, size, ranks, repeat))


def _take(
    settings: Settings, measure: str, contender: str, size: int, ranks: int, repeat: int, directory: Path
) -> list[Sample]:
    if contender != OURS and size > settings.longest_list:
        reason = f"left out: its list would take {size * BYTES / 1e9:,.0f} GB"
        return [Sample(measure, contender, ranks, repeat, (), size, reason)]
    order = {"measure": measure, "contender": contender, "length": size, "ranks": ranks}
    (directory / "order.json").write_text(json.dumps(order))
    # Without large pages, which numpy asks the kernel for: a megabyte could not be told from two.
    line = ["env", "NUMPY_MADVISE_HUGEPAGE=0", sys.executable, __file__, "--rank", str(directory)]
    with running(line, directory, settings.timeout) as command:
        command.finish()
        notes = json.loads((directory / "notes.json").read_text())
    return [Sample(name, contender, ranks, repeat, (value,), size) for name, value in notes.items()]


def tables(rows: Sequence[Row], _: Settings) -> list[str]:
    titles = {
        "first": ("The first index, ms", MILLI),
        "memory": ("Memory, MB", 1e6),
        "traced": ("Of it traced, MB", 1e6),
        "epoch": ("A whole epoch, million indices a second", 1e6),
    }
    return [by_contender(title, rows, name, TORCH, unit, "samples") for name, (title, unit) in titles.items()]


def rank(directory: Path) -> None:
    order = read_order(directory)
    name = order["contender"]
    kind = getattr(importlib.import_module(HOMES[name]), name)
    make = functools.partial(kind, range(order["length"]), num_replicas=order["ranks"], rank=0)
    notes = first(make, traced=name == OURS) if order["measure"] == "first" else epoch(make)
    (directory / "notes.json").write_text(json.dumps(notes))


def first(make: Callable[[], Any], traced: bool) -> dict[str, float]:
    """Seconds to the first index, from the constructor on, and bytes of memory that it and the following ones take."""
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far: importing torch has had a higher one
    started = time.perf_counter()
    indices = iter(make())
    next(indices)
    notes = {"first": time.perf_counter() - started}
    _exhaust(itertools.islice(indices, TAKEN))
    notes["memory"] = max(0, _memory("VmHWM") - before)
    if traced:  # only here: of millions of numbers each would be traced, which takes more memory than they do
        del indices
        tracemalloc.start()
        _exhaust(itertools.islice(iter(make()), TAKEN))
        notes["traced"] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return notes


def epoch(make: Callable[[], Any]) -> dict[str, float]:
    """Indices a second over the rank's whole epoch, from the constructor on."""
    started = time.perf_counter()
    sampler = make()
    _exhaust(iter(sampler))
    return {"epoch": len(sampler) / (time.perf_counter() - started)}


def _exhaust(indices: Iterator[int]) -> None:
    collections.deque(indices, maxlen=0)  # at the speed of C, so that it is the sampler that is measured


def _memory(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1]) * 1024


FLAGS = (
    Flag("--lengths", "A,B", lengths, "1e6,1e8,1e9,1e12", "for the first index and memory"),
    Flag("--epoch-lengths", "A,B", lengths, "1e6,1e7", "for epochs"),
    Flag("--ranks", "A,B", counts, "1,8", "for epochs"),
    Flag("--longest-list", "N", length, "1e8", f"for samplers that hold all indices, about {BYTES} bytes each"),
)
BENCHMARK = Benchmark("sampler", __doc__, plan, tables, FLAGS)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, rank))
