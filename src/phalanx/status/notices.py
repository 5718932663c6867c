"""A notice for the person before the console. A rank reports it to the agent, which prints it once."""

from __future__ import annotations

import sys
from collections.abc import Callable

_given: set[str] = set()
_report: Callable[[str], bool] = lambda _: False  # noqa: E731 (nobody is there to report to)


def give(text: str) -> None:
    """Once in a process. Without an agent, as under torchrun, it is printed here."""
    if text not in _given:
        _given.add(text)
        if not _report(text):
            print(f"phalanx: {text}", file=sys.stderr, flush=True)


def report_by(call: Callable[[str], bool]) -> None:
    """``call`` hands a notice of this process to its agent, and returns whether that has worked."""
    global _report
    _report = call
