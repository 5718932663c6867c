"""The picture of `phalanx bench nodes`. matplotlib is imported here, and only when a picture is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from phalanx.bench.collectives_goals import GLOO, SHM
from phalanx.bench.collectives_table import size
from phalanx.bench.nodes_table import layout, least, parts
from phalanx.bench.rows import Row

# The colours of the picture of collectives.
_STYLES = {SHM: ("#D55E00", "o"), GLOO: ("#0072B2", "s")}
_LIMIT = "what the link allows"


def draw(found: Sequence[Row], path: Path, machine: str) -> None:
    """Times of everything, one panel for each number of ranks. Raises ImportError without matplotlib."""
    # By name, for a type checker need not find what is an optional extra.
    figures = importlib.import_module("matplotlib.figure")
    counts = sorted({row.ranks for row in found})
    figure = figures.Figure(figsize=(6 * len(counts), 5), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, ranks in zip(panels, counts, strict=True):
        _draw_panel(panel, [row for row in found if row.ranks == ranks])
    panels[0].set_ylabel("ms")
    panels[0].legend(frameon=False, loc="upper left")
    figure.suptitle(f"Over two nodes: median, bars between the quartiles\n{machine}", fontsize=9)
    figure.savefig(path)


def _draw_panel(axes, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    for name, (colour, marker) in _STYLES.items():
        times = [row.times[name] for row in rows]
        axes.errorbar(
            places,
            [time.median / 1e3 for time in times],
            yerr=[
                [(time.median - time.low) / 1e3 for time in times],
                [(time.high - time.median) / 1e3 for time in times],
            ],
            label=name,
            color=colour,
            marker=marker,
            linestyle="none",
            markersize=5,
            elinewidth=1.0,
            capsize=2,
        )
    limits = [
        (place, limit / 1e3) for place, row in zip(places, rows, strict=True) if (limit := least(row)) is not None
    ]
    axes.scatter([at for at, _ in limits], [ms for _, ms in limits], label=_LIMIT, color="#7F7F7F", marker="_", s=120)
    axes.set_yscale("log")
    axes.set_xticks(list(places), [_label(row) for row in rows], rotation=60, ha="right", fontsize=8)
    axes.set_title(f"{layout(rows[0])} ranks", loc="left", fontsize=11)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _label(row: Row) -> str:
    what, link = parts(row)
    return f"{size(row.size) if what == 'all_reduce' else what}, {link}"
