"""The picture of a start-up benchmark. matplotlib is imported here, and only when a picture is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from phalanx.bench.results import Line, Sample, lines

# Colours that stay apart for colour-blind readers (Okabe and Ito's), phalanx's own in the strongest.
_COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#7F7F7F")
_MARKERS = "osD^v"


def draw(samples: Sequence[Sample], path: Path, machine: str) -> None:
    """Seconds over ranks, one line for each contender. Raises ImportError when matplotlib is missing."""
    # By name, for a type checker need not find what is an optional extra.
    figures = importlib.import_module("matplotlib.figure")
    contenders: dict[str, list[Line]] = {}
    for line in lines(samples, "start"):
        if line.value is not None:
            contenders.setdefault(line.contender, []).append(line)
    figure = figures.Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(contenders.items()):
        _draw_line(axes, name, points, number)
    ranks = sorted({line.ranks for points in contenders.values() for line in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("seconds")
    axes.set_title("From the command to a barrier passed on all ranks", loc="left", fontsize=12, pad=22)
    axes.text(
        0, 1.02, f"median, bars from min to max; {machine}", transform=axes.transAxes, fontsize=8, color="#555555"
    )
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path)


def _draw_line(axes, name: str, points: Sequence[Line], number: int) -> None:
    points = sorted(points, key=lambda line: line.ranks)
    summaries = [line.value for line in points if line.value is not None]
    medians = [summary.median for summary in summaries]
    below = [summary.median - summary.low for summary in summaries]
    above = [summary.high - summary.median for summary in summaries]
    ours = name.startswith("phalanx")
    axes.errorbar(
        [line.ranks for line in points],
        medians,
        yerr=[below, above],
        label=name,
        color=_COLOURS[number % len(_COLOURS)],
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=5,
        linewidth=2.2 if ours else 1.4,
        elinewidth=1.0,
        capsize=3,
        zorder=3 if ours else 2,
    )
