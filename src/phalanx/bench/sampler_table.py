"""What the samples of `phalanx bench sampler` come to: the tables, with the goals beside the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.bench.report import grid
from phalanx.bench.summary import Summary

OURS, TORCH, TORCHDATA = "ShardSampler", "DistributedSampler", "StatefulDistributedSampler"

_MILLI = 1e-3
_MB = 1e6
_FIRST_GOAL = 1e-3  # seconds
_MEMORY_GOAL = _MB
_SPEED_GOALS = {1: 1.0, 8: 5.0}
"""World size to how many times DistributedSampler's speed."""


@dataclass(frozen=True)
class Sample:
    """One figure of one process."""

    measure: str
    """``first`` in seconds, ``memory`` and ``traced`` in bytes, ``epoch`` in indices a second."""
    contender: str
    length: int
    world: int
    repeat: int
    value: float | None
    """None when it was not measured; the note says why."""
    note: str = ""


def tables(samples: Sequence[Sample]) -> str:
    return "\n\n".join(table for table in (_first(samples), _epochs(samples)) if table)


def shown(length: int) -> str:
    """1000000 as 1e6."""
    digits = str(length)
    zeros = len(digits) - len(digits.rstrip("0"))
    return f"{digits[:-zeros]}e{zeros}" if zeros > 3 else digits


def _first(samples: Sequence[Sample]) -> str:
    found = [sample for sample in samples if sample.measure == "first"]
    if not found:
        return ""
    header = ["samples", "", "first index, ms", "memory, MB", "of it traced, MB", "goal"]
    body = []
    for length, world, contender in _keys(found):
        here = [sample for sample in samples if (sample.length, sample.contender) == (length, contender)]
        first, memory, traced = (_summary(here, measure, world) for measure in ("first", "memory", "traced"))
        cells = [first.show(_MILLI, 2) if first else _note(here)]
        cells += [each.show(_MB, 2) if each else "" for each in (memory, traced)]
        body.append([shown(length), contender, *cells, _verdict(contender, first, memory)])
    words = (
        "From the constructor on. Memory is how far the process's peak grew while the first 100,000 indices were "
        "taken; traced is the part that Python and numpy allocated, by tracemalloc."
    )
    return "\n".join(["## The first index", "", words, "", *grid([header, *body])])


def _verdict(contender: str, first: Summary | None, memory: Summary | None) -> str:
    if contender != OURS or first is None or memory is None:
        return ""
    quick = "met" if first.median <= _FIRST_GOAL else "missed"
    small = "met" if memory.median <= _MEMORY_GOAL else "missed"
    return f"≤ 1 ms: {quick}; ≤ 1 MB: {small}"


def _epochs(samples: Sequence[Sample]) -> str:
    found = [sample for sample in samples if sample.measure == "epoch"]
    if not found:
        return ""
    header = ["samples", "ranks", "", "million indices a second", f"times {TORCH}", "goal"]
    body = []
    for length, world, contender in _keys(found):
        here = [sample for sample in found if sample.length == length]
        speed = _summary([sample for sample in here if sample.contender == contender], "epoch", world)
        times = ratio(here, contender, world)
        cells = [speed.show(1e6, 2) if speed else _note([each for each in here if each.contender == contender])]
        cells += [times.show() if times else "", goal(contender, world, times)]
        body.append([shown(length), str(world), contender, *cells])
    words = "One rank's whole epoch, from the constructor to its last index, in a fresh process."
    return "\n".join(["## A whole epoch", "", words, "", *grid([header, *body])])


def ratio(samples: Sequence[Sample], contender: str, world: int) -> Summary | None:
    """To DistributedSampler in the same repeat: both had the same noise around them."""
    beside = {each.repeat: each.value for each in samples if (each.contender, each.world) == (TORCH, world)}
    own = [each for each in samples if (each.contender, each.world) == (contender, world)]
    pairs = [(each.value, beside.get(each.repeat)) for each in own]
    return Summary.of([value / other for value, other in pairs if value is not None and other is not None])


def goal(contender: str, world: int, times: Summary | None) -> str:
    if contender != OURS or world not in _SPEED_GOALS:
        return ""
    limit = _SPEED_GOALS[world]
    if times is None:
        return f"≥ {limit:g}: not measured"
    return f"≥ {limit:g}: {'met' if times.median >= limit else 'missed'}"


def _keys(samples: Sequence[Sample]) -> list[tuple[int, int, str]]:
    """In the order in which they were first measured."""
    return list(dict.fromkeys((sample.length, sample.world, sample.contender) for sample in samples))


def _summary(samples: Sequence[Sample], measure: str, world: int) -> Summary | None:
    found = [sample for sample in samples if sample.measure == measure and sample.world == world]
    return Summary.of([sample.value for sample in found if sample.value is not None])


def _note(samples: Sequence[Sample]) -> str:
    return "; ".join(dict.fromkeys(sample.note for sample in samples if sample.note))
