"""The script's side of a traceback, when torch has raised in a signal's handler after the script was over."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from phalanx.launch import hindsight


def handler() -> Any:
    """As torch's is: a function from that file."""
    names: dict[str, Any] = {}
    code = "def handler():\n    raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed. ')"
    exec(compile(code, "/site-packages/torch/utils/data/_utils/signal_handling.py", "exec"), names)
    return names["handler"]


def script() -> None:
    raise ConnectionResetError("reset by peer")


def user_side(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of this test."""
    while trace is not None and trace.tb_frame.f_code.co_name.startswith(("test_", "run_of")):
        trace = trace.tb_next
    return trace


def functions(trace: TracebackType | None) -> list[str]:
    found = []
    while trace is not None:
        found.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return found


def run_of(script: Callable[[], None], then: Callable[[], None]) -> None:
    try:
        script()
    except ConnectionResetError:
        then()


def test_raised_after_the_script_it_has_the_scripts_lines() -> None:
    with pytest.raises(RuntimeError) as raised:
        run_of(script, handler())
    assert functions(user_side(raised.value.__traceback__)) == ["handler"]
    assert functions(hindsight.script_side(raised.value, user_side)) == ["script"]


def test_raised_within_the_script_it_has_its_own() -> None:
    def interrupted_script() -> None:
        handler()()

    with pytest.raises(RuntimeError) as raised:
        run_of(script, interrupted_script)
    assert functions(hindsight.script_side(raised.value, user_side)) == ["interrupted_script", "handler"]
