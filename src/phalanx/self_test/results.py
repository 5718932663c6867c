"""What a check found, as each rank writes it and the command reads it."""

from __future__ import annotations

from pathlib import Path

from phalanx import messages
from phalanx.messages import Name, Record, Seconds, Text


class Result(Record, frozen=True):
    """One check, of one rank or of all."""

    name: Name
    failed: bool
    seconds: Seconds
    detail: Text = ""
    ranks: int = 0
    """How many there are; 0: it was not run."""
    ended: float = 0.0
    """When, by the clock that all processes of a machine share: the first failure is the cause of the others."""


def results_path(directory: Path, rank: int) -> Path:
    return directory / f"results-{rank}.jsonl"


def combined(directory: Path) -> dict[str, Result]:
    """By name, what one rank has failed at, or all have passed."""
    by_rank = [_read(path) for path in sorted(directory.glob("results-*.jsonl"))]
    names = dict.fromkeys(name for results in by_rank for name in results)
    every = (_combine([results[name] for results in by_rank if name in results]) for name in names)
    return {result.name: result for result in every if result is not None}


def _read(path: Path) -> dict[str, Result]:
    lines = path.read_bytes().splitlines(keepends=True)
    results = [messages.decode(line, Result, str(path)) for line in lines if line.endswith(b"\n")]
    return {result.name: result for result in results}


def _combine(found: list[Result]) -> Result | None:
    seconds = max(result.seconds for result in found)
    chosen = min((result for result in found if result.failed), key=lambda result: result.ended, default=found[0])
    return messages.replace(chosen, seconds=seconds) if chosen.failed or len(found) == chosen.ranks else None
