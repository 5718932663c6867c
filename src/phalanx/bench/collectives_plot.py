"""The picture of `phalanx bench collectives`. matplotlib is imported here, and only when a picture is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from phalanx.bench.collectives_goals import GLOO, LIMIT, MPI, SHM
from phalanx.bench.collectives_table import size
from phalanx.bench.rows import Row

# Colours that stay apart for colour-blind readers (Okabe and Ito's), shm's own the strongest.
_STYLES = {
    SHM: ("#D55E00", "o", 2.2),
    GLOO: ("#0072B2", "s", 1.4),
    MPI: ("#009E73", "D", 1.4),
    LIMIT: ("#7F7F7F", "*", 0.0),
}
_TICKS_EVERY = 2


def draw(rows: Sequence[Row], path: Path, machine: str) -> None:
    """µs over bytes of all_reduce, one panel for each number of ranks. Raises ImportError without matplotlib."""
    # By name, for a type checker need not find what is an optional extra.
    figures = importlib.import_module("matplotlib.figure")
    reduces = [row for row in rows if row.measure == "all_reduce" and row.ranks > 1]
    counts = sorted({row.ranks for row in reduces})
    figure = figures.Figure(figsize=(5.5 * len(counts), 5), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, ranks in zip(panels, counts, strict=True):
        _draw_panel(panel, [row for row in reduces if row.ranks == ranks], f"{ranks} ranks")
    panels[0].set_ylabel("µs")
    panels[0].legend(frameon=False, loc="upper left")
    figure.suptitle(f"all_reduce of float32: median, bars between the quartiles\n{machine}", fontsize=9)
    figure.savefig(path)


def _draw_panel(axes, rows: Sequence[Row], title: str) -> None:
    for name, (colour, marker, width) in _STYLES.items():
        points = [(row.size, row.times[name]) for row in rows if name in row.times]
        if points:
            axes.errorbar(
                [count for count, _ in points],
                [time.median for _, time in points],
                yerr=[[time.median - time.low for _, time in points], [time.high - time.median for _, time in points]],
                label=name,
                color=colour,
                marker=marker,
                markersize=9 if name == LIMIT else 4,
                linewidth=width,
                elinewidth=1.0,
                capsize=2,
                zorder=3 if name == SHM else 2,
            )
    sizes = sorted({row.size for row in rows})[::_TICKS_EVERY]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size(count) for count in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
