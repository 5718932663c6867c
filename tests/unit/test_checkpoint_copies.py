"""The copy of a save is made while training goes on: what is saved is the state at the moment of the call all the same.

The thread that copies is held back until the test has changed, or tried to change, everything.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import phalanx as px
from phalanx.checkpoint import copy_gate
from phalanx.checkpoint.save import Saving
from phalanx.checkpoint.sharding import ShardBuffer
from phalanx.checkpoint.state import capture_random, check_random, restore_random
from phalanx.checkpoint.storage.base import ALIGNMENT
from phalanx.devices import accelerator
from phalanx.errors import CheckpointError


class Held:
    """The copies of this process, which begin only when they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.began = threading.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held, finish = Held(), ShardBuffer.finish

    def wait_and_finish(copies: ShardBuffer) -> None:
        held.began.set()
        assert held.let_go.wait(20)
        finish(copies)

    monkeypatch.setattr(ShardBuffer, "finish", wait_and_finish)
    yield held
    held.let_go.set()


class Net(nn.Module):
    """Forward changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return self.layers(x)


def trained(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
    return model, optimizer


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(5, 4)).square().sum().backward()


def later(held: Held, work: Callable[[], object]) -> float:
    """Lets the copy go 0.2 s after ``work`` has begun; how long that took."""
    assert held.began.wait(20)
    timer = threading.Timer(0.2, held.let_go.set)
    started = time.monotonic()
    timer.start()
    work()
    took = time.monotonic() - started
    timer.join()
    return took


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda each: getattr(each, "__name__", str(each)))
def test_whatever_changes_right_after_save_is_not_in_it(
    tmp_path: Path, held: Held, kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model, optimizer = trained(kind, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    extra: dict[str, Any] = {"list": [1], "tensor": torch.ones(3), "ema": copy.deepcopy(model)}
    state = px.State(model=model, optimizer=optimizer, scheduler=scheduler, step=5, extra=extra)
    want = copy.deepcopy(state.state_dict())
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
        # Forward and backward do not wait, and change buffers, plain values and random numbers.
        backward(model, optimizer)
        extra["list"].append(2)
        extra["tensor"].zero_()
        with torch.no_grad():
            for parameter in extra["ema"].parameters():
                parameter.zero_()
        assert held.began.wait(20)
        assert not held.let_go.is_set()
        again = copy.deepcopy(model), copy.deepcopy(optimizer)  # what others may do with them goes on as well
        torch.save(again, io.BytesIO())
        assert later(held, optimizer.step) > 0.15
        scheduler.step()
    fresh, other = trained(kind, **options)
    loaded = px.State(
        model=fresh, optimizer=other, scheduler=torch.optim.lr_scheduler.StepLR(other, 1), extra={"ema": Net()}
    )
    assert px.Checkpointer(tmp_path).load_latest(loaded) is loaded
    found = loaded.state_dict()
    for part in ("model", "optimizer", "extra", "rng"):
        assert_equal(found[part], want[part], part)
    assert loaded.scheduler.state_dict()["last_epoch"] == want["scheduler"]["last_epoch"]


def assert_equal(found: Any, want: Any, where: str) -> None:
    if isinstance(want, Tensor):
        assert torch.equal(found, want), where
    elif isinstance(want, dict):
        assert found.keys() == want.keys(), where
        for key, value in want.items():
            assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert len(found) == len(want), where
        for number, value in enumerate(want):
            assert_equal(found[number], value, f"{where}.{number}")
    else:
        assert (found == want) if not hasattr(want, "shape") else (found == want).all(), where


def test_loading_waits_too_and_nothing_of_ours_stays(tmp_path: Path, held: Held) -> None:
    model, optimizer = trained(torch.optim.Adam)
    want = copy.deepcopy(model.state_dict())
    before = nn.Module.load_state_dict, dict(_global_optimizer_pre_hooks)
    zeros = {name: torch.zeros_like(value) for name, value in model.layers[0].state_dict().items()}  # type: ignore
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        assert later(held, lambda: model.layers[0].load_state_dict(zeros)) > 0.15  # type: ignore[index, operator]
    fresh = Net()
    px.Checkpointer(tmp_path).load_latest(model=fresh)
    assert_equal(fresh.state_dict(), want, "model")
    assert not model.layers[0].weight.any()  # type: ignore
    assert before == (nn.Module.load_state_dict, dict(_global_optimizer_pre_hooks))


def by_version(parameter: nn.Parameter, value: float) -> None:
    with torch.no_grad():
        parameter.fill_(value)


def by_data(parameter: nn.Parameter, value: float) -> None:
    parameter.data.fill_(value)  # no version tells of this


@pytest.mark.parametrize("change", [by_version, by_data])
def test_changes_past_every_optimizer_are_noticed_once_and_then_harmless(
    tmp_path: Path, held: Held, change: Callable[[nn.Parameter, float], None]
) -> None:
    """Parameters of no optimizer are copied before save() returns in any case."""
    model, optimizer = trained(torch.optim.SGD)

    def save_and_change(step: int, value: float, optimizer: Any) -> None:
        held.let_go.clear()
        held.began.clear()
        checkpointer.save(step, model=model, optimizer=optimizer)
        assert held.began.wait(20)
        for parameter in model.parameters():
            change(parameter, value)
        held.let_go.set()

    with px.Checkpointer(tmp_path) as checkpointer:
        save_and_change(1, 2.0, optimizer)
        with pytest.raises(
            CheckpointError, match=r"model\.layers\.0\.weight was changed in place right after save\(\)"
        ):
            checkpointer.wait()
        for step, given in ((2, optimizer), (3, None)):
            save_and_change(step, step + 1.0, given)
            checkpointer.wait()
            fresh = Net()
            state = px.Checkpointer(tmp_path).load_latest(model=fresh)
            assert state is not None
            assert state.step == step
            assert all((parameter == step).all() for parameter in fresh.parameters())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_forward_that_changes_its_weights_is_no_error(tmp_path: Path, held: Held, kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(4, 3, max_norm=1.0), nn.Linear(3, 1))
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(5.0)
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizer=torch.optim.SGD(model.parameters()))
        assert held.began.wait(20)
        model(torch.tensor([[0, 1]]))
        assert (model.get_parameter("0.weight")[0] < 1).all()
        held.let_go.set()
    px.Checkpointer(tmp_path).load_latest(model=model)
    assert (model.get_parameter("0.weight") == 5).all()


def test_a_process_forked_during_a_save_does_not_wait_for_it(tmp_path: Path, held: Held) -> None:
    """As a worker of a DataLoader is. The thread that copies is not in it."""
    before = nn.Module.load_state_dict
    model, optimizer = trained(torch.optim.SGD)

    def work() -> None:
        copy_gate._wait_for_copies()
        assert nn.Module.load_state_dict is before

    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        assert held.began.wait(20)
        with copy_gate._lock:  # as the thread may hold it at that moment
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
        child.join(10)
        code = child.exitcode
        child.kill()
        child.join()
        held.let_go.set()
    assert code == 0


def test_nobody_else_may_write_while_a_save_is_under_way(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when the wait for it has failed."""

    def fail(*_: Any) -> None:
        raise CheckpointError("a rank has died")

    monkeypatch.setattr(Saving, "finish", fail)
    checkpointer = px.Checkpointer(tmp_path)
    checkpointer.save(1, model=nn.Linear(2, 2))
    unlock, found = checkpointer._unlock, []
    assert unlock is not None

    def look() -> None:
        found.append((tmp_path / "step-1").exists())
        unlock()

    checkpointer._unlock = look

    def close() -> None:
        with pytest.raises(CheckpointError, match="a rank has died"):
            checkpointer.close()

    later(held, close)
    assert found == [True]


@pytest.mark.parametrize(
    ("make", "is_noticed"),
    [
        (lambda: torch.ones(4), True),
        (lambda: torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (lambda: torch.ones(4, 8)[:, ::2], False),
    ],
)
def test_changes_of_any_memory_layout_and_of_the_optimizer_are_noticed(
    tmp_path: Path, held: Held, make: Callable[[], Tensor], is_noticed: bool
) -> None:
    """What has gaps is copied before save() returns."""
    model = nn.ParameterDict({"weight": nn.Parameter(make())})
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model["weight"].sum().backward()
    optimizer.step()
    moments = optimizer.state[model["weight"]]["momentum_buffer"]
    for step, (name, tensor) in enumerate((("model.weight", model["weight"]), ("momentum_buffer", moments)), 1):
        want = tensor.detach().clone()
        held.let_go.clear()
        with px.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(step, model=model, optimizer=optimizer)
            tensor.data.mul_(3)
            held.let_go.set()
            if is_noticed or (name == "momentum_buffer" and moments.is_contiguous()):
                with pytest.raises(CheckpointError, match=rf"{name} was changed in place right after save"):
                    checkpointer.wait()
                continue
            checkpointer.wait()
        fresh = nn.ParameterDict({"weight": nn.Parameter(make())})
        again = torch.optim.SGD(fresh.parameters(), momentum=0.9)
        px.Checkpointer(tmp_path).load_latest(model=fresh, optimizer=again)
        found = fresh["weight"] if step == 1 else again.state[fresh["weight"]]["momentum_buffer"]
        assert torch.equal(found, want), name


# ---- from a GPU


def test_host_memory_is_pinned_in_its_own_size_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own is rounded up to a power of two: 20.4 GiB took 32 (sgl-project/sglang#37285)."""
    pinned: dict[int, int] = {}

    class Runtime:
        @staticmethod
        def cudaHostRegister(pointer: int, size: int, flags: int) -> int:
            pinned[pointer] = size
            return 2 if size > 1 << 30 else 0

        @staticmethod
        def cudaHostUnregister(pointer: int) -> int:
            del pinned[pointer]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    buffer = ShardBuffer()
    for size in (5000, 4000, 70_000):
        buffer.bytes = size
        buffer._reserve(torch.device("cuda", 0))
        assert len(buffer._memory) >= size
        assert list(pinned.values()) == [(70_000 if size == 70_000 else 5000) + ALIGNMENT]
    del buffer
    assert not pinned
    with pytest.raises(RuntimeError, match="cannot pin 2147483648 bytes of host memory: cudaHostRegister returned 2"):
        accelerator.host_memory(2 << 30, torch.device("cuda", 0))


def test_the_generator_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of an earlier version, which knew of CUDA alone; a state of another kind of device is left out."""
    gpu, own = torch.device("cuda", 0), torch.arange(16, dtype=torch.uint8)
    restored: list[tuple[Tensor, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: own)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append((state, device)))
    captured = check_random(capture_random(gpu))
    earlier = {name: value for name, value in captured.items() if name != "device_type"}
    for state in (captured, check_random(earlier)):
        restore_random(state, gpu)
        assert [(each.tolist(), device) for each, device in restored] == [(own.tolist(), gpu)]
        restored.clear()
        restore_random(state, torch.device("cpu"))
    restore_random({**captured, "device_type": "xpu"}, gpu)
    assert not restored
