"""What a rank reports to its agent while it runs: notices for the user, and the exception with which it is leaving."""

from __future__ import annotations

import sys
from collections.abc import Callable

_given: set[str] = set()
_report: Callable[[str], bool] = lambda _: False  # noqa: E731 (there is no agent)
_report_exception: Callable[[BaseException], object] = lambda _: None  # noqa: E731


def give(text: str) -> None:
    """Reports a notice once per process. Without an agent, as under torchrun, this process prints it."""
    if text not in _given:
        _given.add(text)
        if not _report(text):
            print(f"phalanx: {text}", file=sys.stderr, flush=True)


def leave_with(error: BaseException) -> None:
    """Reports the exception with which a rank leaves its group: while it does so, the group may end the process."""
    _report_exception(error)


def report_by(call: Callable[[str], bool], exception: Callable[[BaseException], object]) -> None:
    """Sets the functions that send to the agent: a notice, with True if that has worked, and an exception."""
    global _report, _report_exception
    _report, _report_exception = call, exception
