"""The clock of a device, with a queue that the test empties by hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.devices import accelerator
from phalanx.recorder import device_clock, phases
from phalanx.recorder.device_clock import DeviceClock
from phalanx.status import layout, own_page, reading
from phalanx.status.page import StatusPage
from phalanx.status.windows import read_windows


class Queue:
    """What `torch.get_device_module` returns: a device whose time the test sets."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.now = 0.0
        self.is_capturing, self.fails = False, False
        queue = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.time: float | None = None

            def record(self, stream: object) -> None:
                assert stream is queue
                assert not queue.is_capturing
                queue.waiting.append(self)

            def query(self) -> bool:
                assert not queue.is_capturing, "operation not permitted when stream is capturing"
                if queue.fails:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                return self.time is not None

            def elapsed_time(self, end: Event) -> float:
                assert self.time is not None
                assert end.time is not None
                return (end.time - self.time) * 1000

        self.Event = Event

    def current_stream(self, device: torch.device) -> Queue:
        return self

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def run(self, *until: float) -> None:
        """The next events pass at these times."""
        for time in until:
            self.waiting.pop(0).time = time


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    found = Queue()
    monkeypatch.setattr(accelerator, "module", lambda device: found)
    yield found
    gc.collect()  # the page and its clock know each other


def new_clock(directory: Path) -> DeviceClock:
    return DeviceClock(StatusPage(directory / "rank-0.status"), torch.device("cuda", 0))


def step(clock: DeviceClock, fetching: float = 0.0) -> None:
    if fetching:
        clock.fetched(fetching)
    clock.own_work_ends()
    clock.backward_ends()
    clock.page.stepped(layout.OTHER)
    clock.stepped()


def seconds(clock: DeviceClock, directory: Path) -> tuple[int, tuple[float, ...]]:
    clock._read_passed()
    found = reading.read(directory / "rank-0.status")
    assert found is not None
    return found.device_steps, tuple(round(value, 6) for value in found.device_seconds)


def test_own_work_waiting_and_data(queue: Queue, tmp_path: Path) -> None:
    clock = new_clock(tmp_path)
    step(clock)
    step(clock, fetching=0.5)  # while the device is still busy: nobody waits for this batch
    assert seconds(clock, tmp_path) == (0, (0.0, 0.0, 0.0))
    queue.run(1.0, 1.2, 4.2, 4.3)
    assert seconds(clock, tmp_path) == (2, (3.0, 0.3, 0.0))
    step(clock, fetching=0.5)  # the device has nothing left to do
    queue.run(5.0, 6.0, 6.5)  # 0.7 s from the end of backward to the batch: 0.2 s of these are the optimizer's
    assert seconds(clock, tmp_path) == (3, (4.2, 0.8, 0.5))
    clock.page.stepped(layout.OTHER)  # an optimizer's step without a backward is not counted
    clock.stepped()
    assert seconds(clock, tmp_path)[0] == 3


def test_windows_are_by_the_clock_of_the_device(queue: Queue, tmp_path: Path) -> None:
    clock = new_clock(tmp_path)
    for number in range(30):
        step(clock)
        queue.run(number + 0.75, number + 1.0)
    clock._read_passed()
    [first, second] = read_windows(tmp_path / "rank-0.status")
    assert (first.updates, second.updates) == (20, 30)
    assert first.seconds["device work"] == pytest.approx(7.5)
    assert first.own == pytest.approx(0.75)


def test_nothing_is_claimed_before_events_have_passed(queue: Queue, tmp_path: Path) -> None:
    clock = new_clock(tmp_path)
    for _ in range(30):
        step(clock)
    assert read_windows(tmp_path / "rank-0.status") == ()
    queue.fails = True  # the script meets the error itself
    step(clock, fetching=0.1)
    clock.answer()


def test_no_event_is_touched_while_a_graph_is_captured(queue: Queue, tmp_path: Path) -> None:
    """On any thread: it would break the capture."""
    clock = new_clock(tmp_path)
    step(clock)
    clock.answer()
    queue.is_capturing = True
    before = len(queue.waiting)
    step(clock, fetching=0.1)
    clock.answer()
    assert len(queue.waiting) == before
    queue.is_capturing = False
    clock.answer()  # another thread cannot know yet
    assert len(queue.waiting) == before
    queue.run(1.0, 1.5, 1.5)
    clock.fetched(0.1)  # a graph that is replayed calls no hook but this one
    clock.answer()
    assert len(queue.waiting) > 0
    assert seconds(clock, tmp_path) == (1, (0.0, 0.5, 0.0))


def test_what_the_device_does(queue: Queue, tmp_path: Path) -> None:
    clock = new_clock(tmp_path)

    def state() -> str:
        clock.answer()
        found = reading.read(tmp_path / "rank-0.status")
        assert found is not None
        return found.device

    assert state() == "unknown"
    step(clock)
    assert state() == "busy"
    queue.run(1.0)
    assert state() == "waits"
    queue.run(2.0, 2.1)  # backward, and what was asked for
    assert state() == "idle"
    assert state() == "busy"  # the host has given it something since: no event of ours shows what
    queue.run(3.0)
    assert state() == "idle"


def test_an_optimizer_on_the_cpu_has_none(tmp_path: Path) -> None:
    page = StatusPage(tmp_path / "rank-0.status")
    weight = torch.nn.Parameter(torch.ones(1))
    for groups in ([{"params": [weight]}], [{"params": []}, {"params": [weight]}], [{"params": []}]):
        optimizer = torch.optim.SGD(groups, lr=0.1)
        assert device_clock.of_optimizer(optimizer, page) is None
    assert device_clock.clock is None


def test_a_hook_that_fails_does_not_reach_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks: list[Any] = []
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        monkeypatch.setattr(phases, name, hooks.append)
    for name in (phases.dataloader.NEXT, phases.BACKWARD, phases.SAVE):
        monkeypatch.setattr(name, "wrap", lambda make: None)
    monkeypatch.setattr(own_page, "_when_begun", [])
    phases.install()
    monkeypatch.setattr(own_page, "current", SimpleNamespace)  # a page that has nothing
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for hook in hooks * 2:
        assert hook(optimizer, (), {}) is None
    assert capsys.readouterr().err.count("phalanx: what this rank does could not be recorded (AttributeError") == 2
