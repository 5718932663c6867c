"""The common part of every benchmark: its flags, its samples and their statistics, its tables and result files.

It imports no torch: the process that starts the measured ones should cost nothing beside them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from phalanx.argparser import Parser
from phalanx.bench.commands import Sample, Settings, Step, describe, report_progress, take

KB, MB = 2**10, 2**20
MICRO, MILLI = 1e-6, 1e-3


@dataclass(frozen=True)
class Summary:
    """A median, with the extremes or the quartiles around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def extremes(values: Sequence[float]) -> Summary | None:
        return Summary(statistics.median(values), min(values), max(values)) if values else None

    @staticmethod
    def quartiles(values: Sequence[float]) -> Summary | None:
        """For many values, of which a few were taken while the machine did something else."""
        if len(values) < 2:
            return Summary.extremes(values)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Summary(median, low, high)


def show(summary: Summary | None, unit: float = 1.0) -> str:
    """The text ``median (low–high)``, with about three digits of the median; empty for None."""
    if summary is None:
        return ""
    size = abs(summary.median / unit)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    median, low, high = (f"{value / unit:.{digits}f}" for value in (summary.median, summary.low, summary.high))
    return f"{median} ({low}–{high})"


@dataclass(frozen=True)
class Row:
    """All contenders at one piece of work: a collective of one size, a step of one model, a start of so many ranks."""

    measure: str
    ranks: int
    size: int
    samples: Mapping[str, Sequence[Sample]]  # by contender, in the order in which they were first measured

    def times(self, contender: str) -> Summary | None:
        """Over all turns of all repeats, with the quartiles; with the extremes, where a repeat has one value."""
        found = [each.values for each in self.samples.get(contender, ())]
        values = list(itertools.chain(*found))
        return Summary.quartiles(values) if max(map(len, found), default=0) > 1 else Summary.extremes(values)

    def medians(self, contender: str) -> dict[int, float]:
        """The median of each repeat."""
        return {each.repeat: statistics.median(each.values) for each in self.samples.get(contender, ()) if each.values}

    def ratio(self, over: str, under: str) -> Summary | None:
        """The ratio of the medians of each repeat, within which the noise was the same for all; with the extremes."""
        ones, others = self.medians(over), self.medians(under)
        return Summary.extremes([ones[repeat] / others[repeat] for repeat in ones if repeat in others])

    def cost(self, one: str, other: str) -> Summary | None:
        """The median difference of turns that came one after the other, in each repeat. It shows differences that are
        smaller than what the machine's speed changes by within a repeat."""
        others = {each.repeat: each.values for each in self.samples.get(other, ())}
        found = [(each.values, others.get(each.repeat)) for each in self.samples.get(one, ())]
        return Summary.extremes([statistics.median(map(operator.sub, a, b)) for a, b in found if a and b])

    def notes(self, contender: str) -> list[str]:
        """Each note once; one that stands in place of a value says how often, for some fail only at times."""
        found = self.samples.get(contender, ())
        counts = collections.Counter((each.note, not each.values) for each in found if each.note)
        return [f"{note} ({count} of {len(found)})" if failed else note for (note, failed), count in counts.items()]


def rows(samples: Iterable[Sample]) -> list[Row]:
    """One for each measure, number of ranks and size, in the order in which they were first measured."""
    groups: dict[tuple[str, int, int], dict[str, list[Sample]]] = {}
    for each in samples:
        group = groups.setdefault((each.measure, each.ranks, each.size), {})
        group.setdefault(each.contender, []).append(each)
    return [Row(*key, group) for key, group in groups.items()]


def table(title: str, header: Sequence[str], body: Sequence[Sequence[str]], words: str = "") -> str:
    """Markdown that reads well on a terminal too; empty without rows. Columns without content are left out, and a first
    cell that repeats the one above it stays empty."""
    if not body:
        return ""
    keep = [column for column in range(len(header)) if any(row[column] for row in body)]
    before = ["", *(row[0] for row in body[:-1])]
    lines = [
        list(header),
        *(["" if row[0] == last else row[0], *row[1:]] for row, last in zip(body, before, strict=True)),
    ]
    cells = [[row[column] for column in keep] for row in lines]
    widths = [max(len(row[column]) for row in cells) for column in range(len(keep))]
    text = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"## {title}", "", *([words, ""] if words else []), text[0], rule, *text[1:]])


Pairs = Sequence[tuple[str, str]]


def compare(
    title: str,
    rows: Sequence[Row],
    times: Sequence[str],
    ratios: Pairs = (),
    costs: Pairs = (),
    extra: Iterable[tuple[str, Callable[[Row], str]]] = (),
    unit: Literal["µs", "ms"] = "ms",
) -> str:
    """A table with a line for each row: the times of these contenders, and what pairs of them come to. A cost is shown
    with its part of the second one's time."""
    scale = MICRO if unit == "µs" else MILLI
    header = ["ranks", "", "size", *(f"{name}, {unit}" for name in times)]
    header += [f"{one} / {other}" for one, other in ratios] + [f"{one} − {other}, {unit}" for one, other in costs]
    body = []
    for row in rows:
        cells = [str(row.ranks), row.measure, size_text(row.size), *(show(row.times(name), scale) for name in times)]
        cells += [show(row.ratio(*pair)) for pair in ratios]
        for one, other in costs:
            cost, base = row.cost(one, other), row.times(other)
            cells.append(f"{show(cost, scale)}, {cost.median / base.median:.2%}" if cost and base else "")
        body.append([*cells, *(cell(row) for _, cell in extra)])
    return table(title, [*header, *(name for name, _ in extra)], body)


def by_contender(
    title: str, rows: Sequence[Row], measure: str, base: str, unit: float = 1.0, size: str = "size"
) -> str:
    """A table of one measure, with a line for each contender, its ratio to ``base``, and its notes."""
    body = [
        [str(row.ranks or ""), f"{row.size:,}" if row.size else "", name, show(row.times(name), unit),
         show(row.ratio(name, base)), "; ".join(row.notes(name))]
        for row in rows if row.measure == measure for name in row.samples
    ]  # fmt: skip
    return table(title, ["ranks", size, "", "median (min–max)", f"of {base}: median (min–max)", ""], body)


def size_text(count: int) -> str:
    """A size as text, in units of 2**10 and 2**20 bytes; empty for 0."""
    if count < KB:
        return f"{count} B" if count else ""
    unit, name = (MB, "MB") if count >= MB else (KB, "KB")
    return f"{count // unit} {name}" if count % unit == 0 else f"{count / unit:.1f} {name}"


class Flag(NamedTuple):
    """One flag of a benchmark."""

    name: str
    metavar: str
    type: Callable[[str], object]
    default: object
    help: str = ""


def count(text: str, least: int = 0) -> int:
    if not text.strip().isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {'positive' if least else 'whole'} number")
    return int(text)


positive = functools.partial(count, least=1)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return value


def size(text: str) -> int:
    """``64``, ``16K`` or ``4M``, in bytes."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.strip())
    value = int(found[1]) * {"": 1, "K": KB, "M": MB}[found[2]] if found else 0
    if value == 0 or value % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 64, 16K or 4M, of whole float32 numbers")
    return value


def several(kind: Callable[[str], int]) -> Callable[[str], tuple[int, ...]]:
    return lambda text: tuple(sorted({kind(part) for part in text.split(",")}))


counts, sizes = several(positive), several(size)


def among(names: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of these, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        if unknown := [part for part in text.split(",") if part not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return tuple(text.split(","))

    return parse


METHOD = """\
A turn lasts from the first rank's start to the last one's end, and each rank has one thread. Times are medians, with
the quartiles of all turns, or, where a repeat has one value, the extremes. Ratios and differences are those of the
medians of each repeat, and costs the medians of what two turns beside each other differ by, with the extremes.
KB and MB are 2^10 and 2^20 bytes."""


@dataclass(frozen=True)
class Benchmark:
    """A measurement, and the tables that are made of it."""

    name: str
    about: str | None  # what is measured and how: the help's text, and the page's
    plan: Callable[[Settings], Iterable[Step]]  # raises UsageError for settings that cannot be measured
    tables: Callable[[Sequence[Row], Settings], Sequence[str]]
    flags: tuple[Flag, ...]
    repeats: int = 3
    timeout: float = 120.0

    def parse(self, argv: Sequence[str], prog: str = "", out: Path = Path("results")) -> Settings:
        parser = Parser(prog=prog or f"phalanx bench {self.name}", description=self.about, allow_abbrev=False)
        timeout = Flag("--timeout", "S", seconds, self.timeout, "for one command")
        repeats = Flag("--repeats", "N", positive, self.repeats)
        for flag in (*self.flags, repeats, timeout, Flag("--out", "DIR", Path, out)):
            words = f"{flag.help}; default %(default)s" if flag.help else "default %(default)s"
            parser.add_argument(flag.name, metavar=flag.metavar, type=flag.type, default=flag.default, help=words)
        return parser.parse_args(argv)

    def run(self, settings: Settings) -> None:
        """Measures, prints the tables and writes NAME-DATE.json and .md; those of the same day are replaced."""
        machine = describe()
        samples = take(list(self.plan(settings)))
        text = "\n\n".join(part for part in self.tables(rows(samples), settings) if part)
        about = "\n".join(f"- {name}: {value}" for name, value in machine.items())
        print(f"{about}\n\n{text}")
        day = machine["date"].split()[0]
        stem = settings.out / f"{self.name}-{day}"
        settings.out.mkdir(parents=True, exist_ok=True)
        given = {name: value for name, value in vars(settings).items() if name != "out"}
        record = {"machine": machine, "settings": given, "samples": [dataclasses.asdict(each) for each in samples]}
        one_line_each = json.dumps(record, default=str).replace('{"measure"', '\n{"measure"')
        stem.with_suffix(".json").write_text(f"{one_line_each}\n")
        parts = (f"# {self.name}, {day}", about, (self.about or "").strip(), METHOD, f"Settings: {given}", text)
        stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
        report_progress(f"written: {stem}.json, .md")
