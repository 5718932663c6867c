"""What a benchmark says and writes: progress, the table, and the files that keep a run."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.bench.command import Interrupted, interruptible


def say(text: str, end: str = "\n") -> None:
    print(f"bench: {text}", end=end, file=sys.stderr, flush=True)


def until_interrupted(work: Callable[[], None]) -> int:
    """Does it, and returns the exit code; a signal ends it early."""
    try:
        with interruptible():
            work()
    except Interrupted as interrupt:
        say("interrupted; nothing was written, and nothing is left running")
        return 128 + interrupt.number
    return 0


def machine_list(machine: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in machine.items())


def grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table that reads well on a terminal and is Markdown as well; the first row is its header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]]


@dataclasses.dataclass(frozen=True)
class Report:
    """One run of a benchmark, ready to be written."""

    name: str
    """The files are called NAME-DATE; those of the same day are replaced."""
    title: str
    machine: Mapping[str, str]
    settings: Any
    samples: Sequence[Any]
    """Dataclasses, like the settings."""
    method: str
    """A sentence or two on how it was measured."""
    text: str
    draw: Callable[[Path, str], None] | None = None
    """Draws a picture to a path, with some words about the machine; raises ImportError without matplotlib."""

    def print(self) -> None:
        print(f"{machine_list(self.machine)}\n\n{self.text}")

    def write(self, out: Path) -> None:
        """NAME-DATE.json, .md and, where it can be drawn, .png."""
        out.mkdir(parents=True, exist_ok=True)
        day = self.machine["date"].split()[0]
        stem = out / f"{self.name}-{day}"
        stem.with_suffix(".json").write_text(self._json())
        image = self._picture(stem.with_suffix(".png"))
        page = f"# {self.title}, {day}\n\n{machine_list(self.machine)}\n\n{self.method}\n\n{self.text}\n{image}"
        stem.with_suffix(".md").write_text(page)
        say(f"written: {stem}.json, .md" + (", .png" if image else ""))

    def _json(self) -> str:
        settings = {name: value for name, value in vars(self.settings).items() if name != "out"}
        samples = ",\n".join("  " + json.dumps(dataclasses.asdict(sample)) for sample in self.samples)
        head = json.dumps({"machine": dict(self.machine), "settings": settings}, indent=1, default=str)
        # One line a sample: there are thousands of figures.
        return f'{head.removesuffix("}").rstrip()},\n "samples": [\n{samples}\n ]\n}}\n'

    def _picture(self, path: Path) -> str:
        if self.draw is None:
            return ""
        about = f"{self.machine['CPU']}, {self.machine['cores']} cores, torch {self.machine['torch']}"
        try:
            self.draw(path, about)
        except ImportError:
            say("matplotlib is not installed, so no plot is drawn; `pip install matplotlib` brings it")
            return ""
        return f"\n![{self.title}]({path.name})\n"
