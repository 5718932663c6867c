"""What the series of `phalanx bench nodes` come to: beside flat gloo, beside what the link allows, and the goals."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.bench.collectives_goals import GLOO, MB, SHM
from phalanx.bench.collectives_table import size
from phalanx.bench.on_nodes import NODES, UNSHAPED
from phalanx.bench.report import grid
from phalanx.bench.rows import Row
from phalanx.bench.summary import Summary
from phalanx.testing.virtual_links import bits_per_second

ALONE = "alone"
_MILLI = 1e3
"""µs in a ms."""
_GOAL_LINK, _GOAL_RANKS, _GOAL_SIZE = "1gbit", 8, 25 * MB
_TIMES_GLOO, _OF_THE_LINK = 1.8, 0.8


def parts(row: Row) -> tuple[str, str]:
    """What was measured, and over which link."""
    what, _, link = row.measure.partition(" over ")
    return what, link


def least(row: Row) -> float | None:
    """The µs that the link needs at least for what one node must send the other; None when it has no limit."""
    _, link = parts(row)
    return None if link == UNSHAPED else row.size * 8 / bits_per_second(link) * 1e6


def of_the_link(row: Row) -> Summary | None:
    """What part of shm's time the link needs, with the extremes of the repeats."""
    limit = least(row)
    return None if limit is None else Summary.of([limit / time for time in row.repeats[SHM].values()])


def verdicts(row: Row) -> list[str]:
    """What was promised of this row, and whether it was kept."""
    if (*parts(row), row.ranks, row.size) != ("all_reduce", _GOAL_LINK, _GOAL_RANKS, _GOAL_SIZE):
        return []
    ratio, share = row.ratio(GLOO, SHM), of_the_link(row)
    assert ratio is not None
    assert share is not None
    return [
        f"gloo/shm ≥ {_TIMES_GLOO:g}: {'met' if ratio.median >= _TIMES_GLOO else 'missed'}",
        f"of the link ≥ {_OF_THE_LINK:.0%}: {'met' if share.median >= _OF_THE_LINK else 'missed'}",
    ]


def tables(found: Sequence[Row]) -> str:
    reduces = [row for row in found if parts(row)[0] == "all_reduce"]
    steps = [row for row in found if parts(row)[0] != "all_reduce"]
    return "\n\n".join([_reduces(reduces), _steps(steps), outcome(found)])


def outcome(found: Sequence[Row]) -> str:
    judged = [verdict for row in found for verdict in verdicts(row)]
    if not judged:
        return f"Goals: none for what was measured; they are for all_reduce of {size(_GOAL_SIZE)} over {_GOAL_LINK}."
    met = sum(verdict.endswith("met") for verdict in judged)
    return f"Goals: {met} of {len(judged)} met. {'; '.join(judged)}."


def layout(row: Row) -> str:
    return f"{NODES} × {row.ranks // NODES}"


def _reduces(found: Sequence[Row]) -> str:
    header = ["nodes × ranks", "link", "size", "gloo, ms", "shm, ms", "gloo / shm", "of the link", "goals"]
    body = []
    for row in found:
        times = [_ms(row.times[name]) for name in (GLOO, SHM)]
        share = of_the_link(row)
        shown = f"{share.median:.0%} ({share.low:.0%}–{share.high:.0%})" if share else ""
        cells = [layout(row), parts(row)[1], size(row.size), *times, _ratio(row), shown, "; ".join(verdicts(row))]
        body.append(cells)
    return "\n".join(["## all_reduce of float32", "", *grid([header, *body])])


def _steps(found: Sequence[Row]) -> str:
    header = [
        "nodes × ranks",
        "link",
        "gradients, MB",
        "without communication, ms",
        "gloo, ms",
        "shm, ms",
        "gloo / shm",
    ]
    body = [
        [
            layout(row),
            parts(row)[1],
            f"{row.size / MB:.1f}",
            *(_ms(row.times[name]) for name in (ALONE, GLOO, SHM)),
            _ratio(row),
        ]
        for row in found
    ]
    return "\n".join(["## A training step with DDP", "", *grid([header, *body])])


def _ms(time: Summary) -> str:
    return time.show(_MILLI, 2 if time.median < 10 * _MILLI else 0)


def _ratio(row: Row) -> str:
    ratio = row.ratio(GLOO, SHM)
    return ratio.show() if ratio else ""
