"""What stands around a step, in a world of one: metrics, logs, accumulation, precision, the line."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px
from phalanx import attempt
from phalanx import world as worlds
from phalanx.devices import accelerator
from phalanx.errors import UsageError
from phalanx.status import own_page, reading
from phalanx.status.page import StatusPage
from phalanx.train import progress
from phalanx.train.progress import RankProgress, averages, describe


@pytest.fixture(autouse=True)
def a_run_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_resumed_from", None)


# ---- metrics


def test_metrics_alone() -> None:
    mean, total, largest, smallest = px.Mean(), px.Sum(), px.Max(), px.Min()
    mean.update(torch.tensor([1.0, 2.0, 6.0]))
    mean.update(2.0, count=3)
    mean.update(torch.tensor(5.0, requires_grad=True), count=2)
    total.update(torch.tensor([1, 2]))
    total.update(0.5)
    for metric in (largest, smallest):
        metric.update(torch.tensor([3.0, -7.0]))
        metric.update(1)
    assert px.compute_metrics(mean=mean, total=total, largest=largest, smallest=smallest) == {
        "mean": (9.0 + 6.0 + 10.0) / 8,
        "total": 3.5,
        "largest": 3.0,
        "smallest": -7.0,
    }
    mean.reset()
    assert math.isnan(mean.compute())
    assert math.isnan(px.Max().compute())


def test_a_mean_of_many_values_with_a_count_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="got 3 values with count=3"):
        px.Mean().update(torch.ones(3), count=3)
    with pytest.raises(UsageError, match=r"loss=3\.0 is not a metric"):
        px.compute_metrics(loss=3.0)  # type: ignore[arg-type]


def test_a_mean_of_halves_is_added_up_in_full() -> None:
    mean = px.Mean()
    for _ in range(3000):
        mean.update(torch.tensor(1.001, dtype=torch.bfloat16))
    assert mean.compute() == torch.tensor(1.001, dtype=torch.bfloat16).item()


# ---- log


def test_log_keeps_sums_and_gives_them_once() -> None:
    progress.take_logged()
    px.log(loss=torch.tensor(2.0, requires_grad=True), rate=1)
    px.log(loss=4.0)
    assert progress.take_logged() == {"loss": (6.0, 2), "rate": (1.0, 1)}
    assert progress.take_logged() == {}


@pytest.mark.parametrize(
    ("value", "text"), [(torch.ones(2), r"shape \(2,\); log its mean"), ("much", "is not a number")]
)
def test_what_cannot_be_logged(value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        px.log(loss=value)


# ---- the line


def test_the_line_says_what_matters() -> None:
    own = RankProgress(2, step=120, samples=3840, seconds=6.0, data=1.5, communication=2.0, logged={"loss": (3.0, 6)})
    other = RankProgress(2, step=120, samples=3840, seconds=6.0, communication=0.5, logged={"loss": (1.0, 2)})
    assert describe({0: own, 1: other}, own, 400) == (
        "epoch 2, step 120/400, 1280 samples/s, loss 0.5, 14 s left, data 25%, slowest rank 1 (+38%)"
    )
    own.ended = True
    assert describe({0: own}, own, None) == "epoch 2, step 120, 640 samples/s, loss 0.5, 6.0 s, data 25%"


def test_each_rank_counts_the_same() -> None:
    reports = {
        0: RankProgress(0, logged={"loss": (10.0, 1)}),
        1: RankProgress(0, logged={"loss": (2.0, 3), "rate": (1.0, 1)}),
    }
    assert averages(reports) == {"loss": (10.0 + 2.0 / 3) / 2, "rate": 1.0}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (9.99, "10 s"), (59.4, "59 s"), (61, "1:01 min"), (3660, "1:01 h")]
)
def test_times(seconds: float, text: str) -> None:
    assert progress._time(seconds) == text


def test_a_live_line_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    written.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", written)
    line = progress.ProgressLine()
    line.show("a long one")
    line.show("short")
    line.finish("end")
    assert written.getvalue() == "\ra long one\rshort     \rend  \n"


def test_elsewhere_they_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.delenv("PHALANX_RUN_DIR", raising=False)
    line = progress.ProgressLine()
    line.show("one")
    line.finish("two")
    assert written.getvalue() == "one\ntwo\n"


# ---- track


class Told:
    """A sampler that remembers what it was told."""

    def __init__(self, length: int) -> None:
        self.length, self.epochs, self.counts = length, [], []
        self.epoch = 0

    def __iter__(self) -> Any:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def received(self, count: int) -> None:
        self.counts.append(count)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_sampler_is_told_the_epoch_and_what_was_received(workers: int) -> None:
    data = TensorDataset(torch.arange(10.0))
    sampler = Told(10)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    seen = []
    for (batch,) in px.track(loader, epoch=7, quiet=True):
        seen.append((len(batch), sum(sampler.counts)))
    assert sampler.epochs == [7]
    assert seen == [(4, 4), (4, 8), (2, 10)]


def test_without_a_number_the_passes_are_counted() -> None:
    data = TensorDataset(torch.arange(4.0))
    sampler = Told(4)
    sampler.epoch = 3  # as after load_state_dict
    loader = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    for _ in range(3):
        assert sum(1 for _ in px.track(loader, quiet=True)) == 2
    assert sampler.epochs == [3, 4, 5]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_only_plain_tensors_are_copied_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other layout has a kernel for record_stream."""
    recorded: list[torch.Tensor] = []
    queue = SimpleNamespace(wait_stream=lambda stream: None)
    functions = SimpleNamespace(stream=lambda stream: contextlib.nullcontext(), current_stream=lambda device: queue)
    monkeypatch.setattr(accelerator, "copy_stream", lambda device: queue)
    monkeypatch.setattr(accelerator, "module", lambda device: functions)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    plain = torch.eye(2)
    batch = [plain, plain.to_sparse(), plain.to_sparse_csr(), torch.nested.nested_tensor([plain], layout=torch.jagged)]
    [got] = px.track([batch], device="meta", quiet=True)
    assert [tensor.device.type for tensor in got] == ["meta"] * 4
    assert len(recorded) == 1
    assert recorded[0] is got[0]


def test_track_takes_any_iterable_and_moves_its_tensors() -> None:
    batches = [{"x": torch.ones(2), "name": "a"}, {"x": torch.ones(2), "name": "b"}]
    got = list(px.track(batches, device="meta", quiet=True))
    assert [batch["x"].device.type for batch in got] == ["meta", "meta"]
    assert [batch["name"] for batch in got] == ["a", "b"]
    assert len(px.track(batches)) == 2
    assert list(px.track((x for x in "ab"), quiet=True)) == ["a", "b"]


def test_a_loader_without_a_length() -> None:
    """A DataLoader over an iterable dataset has a len() that raises."""
    loader = DataLoader(px.shard(iter(range(10))), batch_size=4)
    assert [len(batch) for batch in px.track(loader, epoch=0, quiet=True)] == [4, 4, 2]
    with pytest.raises(TypeError, match="has no len"):
        len(px.track(loader))


def test_an_empty_pass_has_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A run may go on from the very end of an epoch."""
    for passes, lines in ((TensorDataset(torch.zeros(0, 1)), 0), (TensorDataset(torch.zeros(1, 1)), 1)):
        assert len(list(px.track(DataLoader(passes), epoch=0))) == lines
        assert capsys.readouterr().err.count("epoch 0") == lines


def test_the_line_tells_of_an_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    own = RankProgress(2, 12, 120, 1.0)
    assert describe({0: own}, own, None).startswith("epoch 2, step 12,")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert describe({0: own}, own, None).startswith("attempt 2, epoch 2, step 12,")
    attempt.resume_from(70)
    assert describe({0: own}, own, None).startswith("attempt 2 from step 70, epoch 2, step 12,")


def test_the_last_line_of_an_epoch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_RUN_DIR", raising=False)
    for x in px.track([torch.ones(8)] * 5, epoch=1):
        px.log(loss=x.mean() / 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("epoch 1, step 5/5, ")
    assert "loss 0.5" in line


def test_a_loop_that_is_left_early_says_nothing_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in px.track([1, 2, 3], epoch=0):
        break
    assert capsys.readouterr().err == ""
    from phalanx.train import track

    assert track.batches_left() is None


def test_a_line_that_stands_there_gets_its_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PHALANX_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(own_page, "_own", StatusPage(tmp_path / "rank-0.status"))
    from phalanx.train import track

    monkeypatch.setattr(track, "_LIVE_EVERY", 0.0)
    monkeypatch.setattr(track, "_REPORT_EVERY", 0.0)
    for number in px.track([1, 2, 3], epoch=0):
        if number == 3:
            break
    lines = capsys.readouterr().err.replace("\r", "\n").split("\n")
    assert [line.partition(", ")[2].partition(",")[0] for line in lines] == ["", "step 1/3", "step 2/3", "step 3/3", ""]


def test_a_run_directory_gets_events_and_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(own_page, "_own", StatusPage(tmp_path / "rank-0.status"))
    for x in px.track([torch.ones(8)] * 3, epoch=2, quiet=True):
        found = reading.read(tmp_path / "rank-0.status")
        assert found is not None
        assert found.phase == "forward"
        px.log(loss=x.mean())
    (event,) = [json.loads(line) for line in (tmp_path / "rank-0.events.jsonl").read_text().splitlines()]
    assert {name: event[name] for name in ("event", "epoch", "step", "samples", "values")} == {
        "event": "epoch",
        "epoch": 2,
        "step": 3,
        "samples": 24,
        "values": {"loss": 1.0},
    }
    assert 0 <= event["data"] <= event["seconds"]
    found = reading.read(tmp_path / "rank-0.status")
    assert found is not None
    assert (found.phase, found.step) == ("other", 3)


class Encoding(collections.UserDict):
    """As the BatchEncoding of transformers: no container that torch knows, with a `to` that returns the same object."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        self.data = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.data.items()}
        return self


class Graph:
    """As a batch of graphs that somebody has written: its `to` takes a device and nothing else."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


def test_batches_that_can_move_themselves_are_moved() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3)])
    batches = [(Encoding(ids=torch.ones(4)), [Graph(torch.ones(2)), packed, "a name", None])]
    for encoding, (graph, sequence, *others) in px.track(batches, device="meta", quiet=True):
        assert encoding["ids"].device.type == graph.nodes.device.type == sequence.data.device.type == "meta"
        assert others == ["a name", None]


# ---- accumulate and autocast


class Counting(nn.Linear):
    """Says when gradients would not be exchanged."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.quiet = 0

    def no_sync(self) -> Any:
        import contextlib

        @contextlib.contextmanager
        def block() -> Any:
            self.quiet += 1
            yield

        return block()


def test_gradients_are_exchanged_for_the_last_part_only() -> None:
    model = Counting()
    parts = px.accumulate(model, every=3)
    sizes, complete, quiet = [], [], []
    for _ in px.track(range(8), epoch=0, quiet=True):
        with parts:
            sizes.append(parts.size)
        complete.append(parts.complete)
        quiet.append(model.quiet)
    assert sizes == [3] * 6 + [2] * 2, "what is left at the end makes a smaller step"
    assert complete == [False, False, True] * 2 + [False, True]
    assert quiet == [1, 2, 2, 3, 4, 4, 5, 5]


def test_a_part_that_fails_does_not_count() -> None:
    parts = px.accumulate(Counting(), every=2)
    with pytest.raises(ZeroDivisionError), parts:
        raise ZeroDivisionError
    with parts:
        assert not parts.complete or parts.size == 2
    assert not parts.complete


@pytest.mark.parametrize(("every", "model", "text"), [(0, Counting(), "1 or more"), (2, nn.Linear(1, 1), "no_sync")])
def test_wrong_arguments_of_accumulate(every: int, model: nn.Module, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        px.accumulate(model, every=every)


def test_autocast_on_a_cpu() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    amp = px.autocast()
    with amp:
        out = layer(torch.ones(2, 4))
        assert out.dtype is torch.bfloat16
    amp.backward(out.float().sum() * 100)
    norm = amp.clip(optimizer, max_norm=1.0)
    assert norm > 1
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    assert torch.stack([grad.norm() for grad in grads]).norm().item() == pytest.approx(1.0, rel=1e-3)
    before = layer.weight.detach().clone()
    amp.step(optimizer)
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.detach(), before - layer.weight.grad)
    amp.load_state_dict(amp.state_dict())
    with px.autocast(enabled=False):
        assert layer(torch.ones(2, 4)).dtype is torch.float32


def scaled_amp() -> px.autocast:
    """As on a GPU without bfloat16: torch's scaler works on the CPU too."""
    amp = px.autocast(enabled=False)
    amp.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return amp


def test_one_step_of_two_optimizers_with_a_scaler() -> None:
    amp = scaled_amp()
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=1.0) for weight in weights)
    for _ in range(2):
        amp.backward(sum(weights, torch.zeros(1)).sum())
        for optimizer in (first, second):
            amp.clip(optimizer, max_norm=100.0)
        with pytest.raises(UsageError, match=r"step\(first, second\)"):
            amp.step(first)
        amp.step(first, second)
        for optimizer in (first, second):
            optimizer.zero_grad()
    assert [weight.item() for weight in weights] == [-2.0, -2.0]
    assert amp.scaler.state_dict()["_growth_tracker"] == 2, "one update for each step"


def test_a_gpu_that_emulates_bfloat16_gets_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A V100 or T4: torch.cuda.is_bf16_supported() is True there, and computing in it is slow."""
    on_gpu = dataclasses.replace(worlds.current(), device=torch.device("cuda", 0))
    monkeypatch.setattr(worlds, "current", lambda: on_gpu)
    for is_native, dtype in ((False, torch.float16), (True, torch.bfloat16)):

        def is_supported(including_emulation: bool = True, is_native: bool = is_native) -> bool:
            return is_native or including_emulation

        monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
        assert px.autocast(enabled=False).dtype is dtype


@pytest.mark.parametrize(("dtype", "text"), [("fp16", "use 'bf16'"), ("fp8", "'fp8'. is unknown")])
def test_wrong_types_for_autocast(dtype: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        px.autocast(dtype)
