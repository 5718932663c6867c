"""The script's side of a traceback, when torch has raised in a signal's handler after the script was over."""

from __future__ import annotations

import argparse
import linecache
import re
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from phalanx.launch.process import exit_report


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
    assert functions(exit_report.script_side(raised.value, user_side)) == ["script"]


def test_raised_in_the_standard_library_after_the_script_it_has_the_scripts_lines() -> None:
    """As when the launcher is on its way to turn the handler off, within signal.getsignal."""
    with pytest.raises(RuntimeError) as raised:
        run_of(script, threading.Thread(target=handler()).run)
    assert functions(user_side(raised.value.__traceback__)) == ["run", "handler"]
    assert functions(exit_report.script_side(raised.value, user_side)) == ["script"]


def test_raised_within_the_script_it_has_its_own() -> None:
    def interrupted_script() -> None:
        handler()()

    with pytest.raises(RuntimeError) as raised:
        run_of(script, interrupted_script)
    assert functions(exit_report.script_side(raised.value, user_side)) == ["interrupted_script", "handler"]


def test_threads_that_die_are_told_a_limited_number_of_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: print("printed as ever", args.exc_type.__name__))
    monkeypatch.setattr(exit_report, "_MOST_DEATHS", 3)
    told: list[Any] = []
    exit_report.report_thread_deaths(told.append)

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    for error in (OSError("shard 12\nis corrupt"), SystemExit(), Mute(), ValueError(), KeyError("too many")):
        thread = threading.Thread(target=_raise, args=[error], name="producer")
        thread.start()
        thread.join()
    assert [death["error"] for death in told] == [
        "OSError: shard 12",
        "Mute: (its message cannot be shown)",
        "ValueError",
    ]
    assert {death["name"] for death in told} == {"producer"}
    assert all(re.fullmatch(r".*test_exit_report.py:\d+", death["place"]) for death in told)
    assert capsys.readouterr().out.count("printed as ever") == 5


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("torch.zeros(3, device='cuda:1')", "cuda:1"),
        ("torch.zeros(3).to(device)", "cuda:0"),
        ("torch.zeros(3).to(args.device)", "cuda:2"),
        ("torch.nn.Linear(1, 1).cuda()", "cuda"),
        ("torch.cuda.set_device(0)", "cuda"),
    ],
)
def test_cuda_is_asked_for_and_torch_has_none(line: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    names = {"torch": torch, "device": torch.device("cuda:0"), "args": argparse.Namespace(device="cuda:2")}
    linecache.cache["/home/ada/train.py"] = (len(line), None, [line], "/home/ada/train.py")
    with pytest.raises(Exception, match=r"CUDA|_cuda_") as raised:
        exec(compile(line, "/home/ada/train.py", "exec"), names)
    note = exit_report.note(raised.value, raised.value.__traceback__)
    assert note == f"this torch has no CUDA; the script asks for {device}"
    built: dict[str, str] = {"xpu": "this torch has no CUDA, but xpu", "cuda": "torch sees no GPU"}
    for kind, fact in built.items():
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind: torch.device(kind))
        note = exit_report.note(raised.value, raised.value.__traceback__)
        assert note == f"{fact}; the script asks for {device}"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert exit_report.note(raised.value, raised.value.__traceback__) == ""
    assert exit_report.note(RuntimeError("another error"), raised.value.__traceback__) == ""
