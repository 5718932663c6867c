"""Notices for the user. A rank reports a notice to its agent, which prints it once."""

from __future__ import annotations

import sys
from collections.abc import Callable

_given: set[str] = set()
_report: Callable[[str], bool] = lambda _: False  # noqa: E731 (there is no agent)


def give(text: str) -> None:
    """Reports a notice once per process. Without an agent, as under torchrun, this process prints it."""
    if text not in _given:
        _given.add(text)
        if not _report(text):
            print(f"phalanx: {text}", file=sys.stderr, flush=True)


def report_by(call: Callable[[str], bool]) -> None:
    """Sets the function that sends a notice to the agent, and returns True if that has worked."""
    global _report
    _report = call
