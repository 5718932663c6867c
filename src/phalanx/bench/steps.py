"""A benchmark as a list of commands, taken one after the other, each in a directory of its own."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from phalanx.bench.report import say

T = TypeVar("T")


class Step(Protocol[T]):
    """One command to measure; as a string, what is said while it runs."""

    @property
    def script(self) -> str:
        """The file beside this one that its ranks run. It is copied, so that nothing beside it can be imported."""
        ...

    def run(self, place: Path) -> T: ...

    def outcome(self, result: T) -> str:
        """What is said when it has ended."""
        ...


def take(steps: Sequence[Step[T]]) -> list[T]:
    """The steps' results, in order. A command that fails ends the benchmark."""
    results = []
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        for number, step in enumerate(steps, 1):
            place = Path(scratch, str(number))
            place.mkdir()
            shutil.copy(Path(__file__).with_name(step.script), place)
            say(f"{number}/{len(steps)} {step}", end=": ")
            try:
                result = step.run(place)
            except BaseException:
                print(file=sys.stderr)  # what is said next gets a line of its own
                raise
            print(step.outcome(result), file=sys.stderr)
            results.append(result)
            shutil.rmtree(place)
    return results
