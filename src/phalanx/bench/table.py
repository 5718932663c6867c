"""The tables of the start-up benchmark, and of others that compare launchers."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.bench.report import grid
from phalanx.bench.results import Line, Sample, goal, lines

_MIB = 2.0**20


def tables(samples: Sequence[Sample]) -> str:
    """Everything that was measured, each with its goal beside it. Figures are medians, with the extremes behind."""
    return "\n".join(
        [
            *section(
                samples,
                "start",
                "Start: from the command to a barrier passed on all ranks",
                "seconds",
            ),
            *section(
                samples,
                "memory",
                "Memory while all ranks wait after the barrier: PSS of all processes, the launcher's included",
                "MiB",
                unit=_MIB,
                digits=0,
            ),
            *section(
                samples,
                "restart",
                "Restart: from the SIGKILL of one rank to the first all_reduce of the next attempt",
                "seconds",
            ),
            *section(samples, "help", "The command without work", "seconds", digits=3),
        ]
    ).rstrip("\n")


def section(
    samples: Sequence[Sample], measure: str, title: str, unit_name: str, unit: float = 1.0, digits: int = 2
) -> list[str]:
    """One measure as a table beside torchrun; nothing if it was not taken."""
    found = lines(samples, measure)
    if not found:
        return []
    header = ["ranks", "", f"{unit_name}: median (min–max)", "of torchrun: median (min–max)", "goal"]
    rows = []
    last = None
    for line in found:
        first = line.ranks != last
        last = line.ranks
        rows.append(
            [
                str(line.ranks or "") if first else "",
                line.contender,
                _value(line, unit, digits),
                line.ratio.show() if line.ratio else "",
                goal(measure, line),
            ]
        )
    keep = [index for index in range(len(header)) if index == 1 or any(row[index] for row in rows)]
    return [f"## {title}", "", *grid([[row[index] for index in keep] for row in [header, *rows]]), ""]


def _value(line: Line, unit: float, digits: int) -> str:
    words = [line.value.show(unit, digits)] if line.value else []
    return "; ".join([*words, *line.notes])
