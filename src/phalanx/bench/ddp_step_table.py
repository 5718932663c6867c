"""What the series of `phalanx bench ddp-step` come to: what communication adds to a step, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.bench.report import grid
from phalanx.bench.rows import Row
from phalanx.bench.summary import Summary

ALONE, BUCKETS, SHM, GLOO, REDUCE = "alone", "buckets", "shm", "gloo", "all_reduce"
PLAIN, OURS = "DDP", "data_parallel"
"""How a model is wrapped, in a job of its own; after the name of a backend."""
_GOAL = 1 / 3
_MILLI = 1e3
"""µs in a ms."""


def share(row: Row) -> Summary | None:
    """What shm adds to a step as a part of what gloo adds, repeat by repeat; None when gloo added nothing."""
    medians = row.repeats
    added = [(medians[SHM][repeat] - alone, medians[GLOO][repeat] - alone) for repeat, alone in medians[ALONE].items()]
    return Summary.of([shm / gloo for shm, gloo in added if gloo > 0])


def verdict(row: Row) -> str:
    part = share(row)
    if part is None:
        return "≤ 1/3: not measured"
    return f"≤ 1/3: {'met' if part.median <= _GOAL else 'missed'}"


def tables(rows: Sequence[Row]) -> str:
    has_wrappers = any(f"{SHM}, {OURS}" in row.times for row in rows)
    return "\n\n".join([_steps(rows), _breakdown(rows), *([_wrappers(rows)] if has_wrappers else [])])


def _steps(rows: Sequence[Row]) -> str:
    header = ["model", "ranks", "without communication, ms", "shm, ms", "gloo, ms"]
    header += ["shm adds, ms", "gloo adds, ms", "of gloo's part", "goal"]
    body = []
    for row in rows:
        part = share(row)
        steps = [row.times[name].show(_MILLI, 1) for name in (ALONE, SHM, GLOO)]
        added = [_difference(row, name, ALONE) for name in (SHM, GLOO)]
        body.append([row.measure, str(row.ranks), *steps, *added, part.show() if part else "", verdict(row)])
    return "\n".join(["## A training step with DDP", "", *grid([header, *body])])


def _breakdown(rows: Sequence[Row]) -> str:
    """The part that shm adds, taken apart by leaving things out."""
    header = ["model", "ranks", "gradients, MB", "shm adds, ms", "of it DDP itself, ms", "of it the collective, ms"]
    header.append("all_reduce of as much, alone, ms")
    body = [
        [
            row.measure,
            str(row.ranks),
            f"{row.size / 2**20:.1f}",
            _difference(row, SHM, ALONE),
            _difference(row, BUCKETS, ALONE),
            _difference(row, SHM, BUCKETS),
            row.times[REDUCE].show(_MILLI, 1),
        ]
        for row in rows
    ]
    words = (
        "DDP itself: a step whose communication hook hands every bucket back as it came, so gradients are copied into "
        "the buckets and back, but nothing is sent. The collective: the rest, as far as the backward pass does not "
        "hide it. The last column is one synchronous all_reduce of all gradients in one tensor, with nothing beside it."
    )
    return "\n".join(["## Where shm's part goes", "", words, "", *grid([header, *body])])


def _wrappers(rows: Sequence[Row]) -> str:
    header = ["model", "ranks", "backend", f"{PLAIN}, ms", f"{OURS}, ms", f"{OURS}/{PLAIN}"]
    body = []
    for row in rows:
        for backend in (SHM, GLOO):
            plain, ours = (f"{backend}, {wrapper}" for wrapper in (PLAIN, OURS))
            times = [row.times[way].show(_MILLI, 1) for way in (plain, ours)]
            ratio = row.ratio(ours, plain)
            body.append([row.measure, str(row.ranks), backend, *times, ratio.show() if ratio else ""])
    words = (
        "Each in processes of its own, as in training: where several models share a process, memory that one of them "
        "gives back serves another, and page faults, which can be a third of such a step, are not seen."
    )
    return "\n".join([f"## {OURS} beside {PLAIN}", "", words, "", *grid([header, *body])])


def _difference(row: Row, of: str, to: str) -> str:
    found = row.difference(of, to)
    return found.show(_MILLI, 1) if found else ""
