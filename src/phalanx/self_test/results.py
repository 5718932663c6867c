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


def results_path(directory: Path, rank: int) -> Path:
    return directory / f"results-{rank}.jsonl"


def combined(directory: Path, names: list[str], ranks: int) -> list[Result]:
    """The results of all ranks: a check has passed when it has on every one of them."""
    by_rank = [_read(results_path(directory, rank)) for rank in range(ranks)]
    return [_combine(name, [found.get(name) for found in by_rank]) for name in names]


def _read(path: Path) -> dict[str, Result]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    results = [messages.decode(line, Result, str(path)) for line in lines]
    return {result.name: result for result in results}


def _combine(name: str, results: list[Result | None]) -> Result:
    found = [result for result in results if result is not None]
    seconds = max((result.seconds for result in found), default=0.0)
    for rank, result in enumerate(results):
        if result is not None and result.failed:
            return Result(name, True, seconds, f"rank {rank}: {result.detail}")
    missing = [str(rank) for rank, result in enumerate(results) if result is None]
    if missing:
        return Result(name, True, seconds, f"not reached by rank{'s' * (len(missing) > 1)} {', '.join(missing)}")
    return Result(name, False, seconds, found[0].detail)
