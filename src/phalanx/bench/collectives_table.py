"""The tables of `phalanx bench collectives`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.bench.collectives_goals import GLOO, KB, LIMIT, MB, MPI, SHM, verdicts
from phalanx.bench.report import grid
from phalanx.bench.rows import Row
from phalanx.bench.summary import Summary

_Column = tuple[str, Callable[[Row], str]]


def tables(rows: Sequence[Row]) -> str:
    """Everything that was measured, each with its goals beside it, and at the end what was missed."""
    reduces = [row for row in rows if row.measure == "all_reduce" and row.ranks > 1]
    with_limit = [row for row in reduces if LIMIT in row.times]
    alone = [row for row in rows if row.ranks == 1]
    others = [row for row in rows if row.measure != "all_reduce"]
    times = [_time(GLOO), _time(SHM)]
    gloo, mpi = _ratio(GLOO, SHM), _ratio(MPI, SHM)
    sections = [
        _section("all_reduce of float32", reduces, [_SIZE, *times, _time(MPI), gloo, mpi, _GOALS]),
        _section(
            "The limit: `a += b` on all ranks at the same time",
            with_limit,
            [_SIZE, _time(SHM), _time(LIMIT), _ratio(SHM, LIMIT)],
        ),
        _section("Other collectives of float32", others, [_NAME, _SIZE, *times, gloo, _GOALS]),
        _section("The call itself: all_reduce in a world of one", alone, [_SIZE, *times]),
    ]
    return "\n\n".join([*(section for section in sections if section), outcome(rows)])


def outcome(rows: Sequence[Row]) -> str:
    """How many goals were met, and which were not."""
    found = [(row, verdict) for row in rows for verdict in verdicts(row)]
    judged = [(row, verdict) for row, verdict in found if not verdict.endswith("not measured")]
    missed = [(row, verdict) for row, verdict in judged if verdict.endswith("missed")]
    left_out = f", {len(found) - len(judged)} not measured" if len(found) > len(judged) else ""
    return "\n".join(
        [
            f"Goals: {len(judged) - len(missed)} of {len(judged)} met{left_out}.",
            *([""] if missed else []),
            *(f"- {row.measure} of {size(row.size)}, {row.ranks} ranks: {verdict}" for row, verdict in missed),
        ]
    )


def size(count: int) -> str:
    """KB and MB are 2**10 and 2**20 bytes here."""
    for unit, name in ((MB, "MB"), (KB, "KB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def _section(title: str, rows: Sequence[Row], columns: Sequence[_Column]) -> str:
    """Without the columns that have nothing to say."""
    if not rows:
        return ""
    cells = [[name for name, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    keep = [index for index in range(len(columns)) if any(line[index] for line in cells[1:])]
    ranks = ["ranks"]
    for before, row in zip([None, *rows], rows, strict=False):
        ranks.append("" if before is not None and before.ranks == row.ranks else str(row.ranks))
    body = [[first, *(line[index] for index in keep)] for first, line in zip(ranks, cells, strict=True)]
    return "\n".join([f"## {title}", "", *grid(body)])


def _time(contender: str) -> _Column:
    def show(row: Row) -> str:
        summary = row.times.get(contender)
        return summary.show(digits=1 if summary.median < 100 else 0) if summary else ""

    return f"{contender}, µs", show


def _ratio(over: str, under: str) -> _Column:
    return f"{over} / {under}", lambda row: _figure(row.ratio(over, under))


def _figure(ratio: Summary | None) -> str:
    return ratio.show(digits=1 if ratio.median >= 10 else 2) if ratio else ""


_SIZE: _Column = ("size", lambda row: size(row.size))
_NAME: _Column = ("", lambda row: row.measure)
_GOALS: _Column = ("goals", lambda row: "; ".join(verdicts(row)))
