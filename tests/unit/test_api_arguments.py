"""A wrong argument of the Python API: one sentence that names it and its value, and nothing is left begun."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx as px
from phalanx.errors import UsageError


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def restored(state: Any) -> None:
    px.ShardSampler([1, 2]).load_state_dict(state)


def model() -> nn.Module:
    return nn.Linear(2, 2)


STATE = px.ShardSampler([1, 2]).state_dict()

WRONG: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "init(seed)": (lambda x: px.init(seed=x), "x", "seed is 'x'; give a whole number."),
    "init(large seed)": (lambda x: px.init(seed=x), 2**64, "give from -9223372036854775808 to 18446744073709551615."),
    "init(timeout)": (lambda x: px.init(timeout=x), "x", "timeout is 'x'; give seconds"),
    "init(nan)": (lambda x: px.init(timeout=x), float("nan"), "timeout is nan; give seconds, more than 0"),
    "init(delta)": (
        lambda x: px.init(timeout=x),
        timedelta(-1),
        "timeout is datetime.timedelta(days=-1); give seconds",
    ),
    "init(backend)": (px.init, 5, "backend is 5; give a name"),
    "init(init_method)": (lambda x: px.init(init_method=x), 5, "init_method is 5; give a name"),
    "init(port)": (lambda x: px.init(init_method=x), "tcp://a:99999", "'tcp://a:99999' has no port or no host"),
    "init(brackets)": (lambda x: px.init(init_method=x), "tcp://[a:5", "'tcp://[a:5' has no port or no host"),
    "init(file)": (lambda x: px.init(init_method=x), f"file:///{'x' * 5000}/y", "lies in no existing directory"),
    "init(store)": (lambda x: px.init(store=x), {}, "store is {}; give a torch.distributed.Store"),
    "init(device)": (lambda x: px.init(device=x), 1.5, "device 1.5 is unknown to torch"),
    "init(rank)": (lambda x: px.init(rank=x, world_size=1), "0", "rank is '0'; give a whole number."),
    "init(world_size)": (lambda x: px.init(rank=0, world_size=x), 1.0, "world_size is 1.0; give a whole number."),
    "data_parallel": (px.data_parallel, 5, "the model is 5; give an nn.Module."),
    "data_parallel(class)": (px.data_parallel, nn.Linear, "give an nn.Module."),
    "data_parallel(odd)": (px.data_parallel, Unprintable(), "the model is a Unprintable; give an nn.Module."),
    "compress": (lambda x: px.data_parallel(model(), compress=x), [], "compress=[] is unknown; there are 'bf16'"),
    "mode": (lambda x: px.data_parallel(model(), x), 5, "mode=5 is unknown; there are 'ddp'"),
    "devices": (lambda x: px.data_parallel(model(), "dp", devices=x), "2", "devices is '2'; give a whole number."),
    "device": (lambda x: px.data_parallel(model(), "dp", devices=x), ["z"], "device 'z' is unknown to torch"),
    "parts": (lambda x: px.data_parallel(model(), "split", parts=x), 5, "parts is 5; give the devices by the names"),
    "rank": (lambda x: px.ShardSampler([1], 1, x), "0", "rank is '0'; give a whole number."),
    "replicas": (lambda x: px.ShardSampler([1], x, 0), "2", "num_replicas is '2'; give a whole number."),
    "sampler(seed)": (lambda x: px.ShardSampler([1], seed=x), None, "seed is None; give a whole number."),
    "dataset": (px.ShardSampler, 5, "the dataset is 5, which has no length"),
    "epoch": (lambda x: px.ShardSampler([1]).set_epoch(x), "1", "epoch is '1'; give a whole number."),
    "state": (restored, 5, "the sampler's state is 5; give what state_dict() returned."),
    "consumed": (restored, {**STATE, "consumed": "1"}, "state['consumed'] is '1'; give a whole number."),
    "shard": (px.shard, 5, "iterable is 5; give something that can be iterated over."),
    "nprocs": (lambda x: px.spawn(print, nprocs=x), "2", "nprocs is '2'; give a whole number."),
    "many nprocs": (lambda x: px.spawn(print, nprocs=x), 10**20, "nprocs is 100000000000000000000; a node runs 1 to"),
    "fn": (px.spawn, 5, "fn is 5, which cannot be called"),
    "args": (lambda x: px.spawn(print, x), 5, "args is 5; give a tuple"),
    "loader": (px.track, 5, "loader is 5; give a DataLoader"),
    "track(epoch)": (lambda x: px.track([], epoch=x), "x", "epoch is 'x'; give a whole number."),
    "track(device)": (lambda x: px.track([], device=x), "cuba", "device 'cuba' is unknown to torch"),
    "every": (lambda x: px.accumulate(px.data_parallel(model()), x), 0, "every is 0; give 1 or more."),
    "every(type)": (lambda x: px.accumulate(px.data_parallel(model()), x), "2", "every is '2'; give a whole number."),
    "main_only": (px.main_only, 5, "main_only got 5, which cannot be called"),
    "log": (lambda x: px.log(loss=x), "x", "px.log(loss='x') is not a number"),
    "mean": (lambda x: px.Mean().update(x), "x", "Mean.update got 'x'; give a number or a tensor."),
    "count": (lambda x: px.Mean().update(1.0, x), "x", "count is 'x'; give how many values the mean is of."),
    "max": (lambda x: px.Max().update(x), "x", "Max.update got 'x'; give a number or a tensor."),
    "sum": (lambda x: px.Sum().update(x), ["y"], "Sum.update got ['y']; give a number or a tensor."),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_sentence(name: str) -> None:
    call, value, sentence = WRONG[name]
    with pytest.raises(UsageError) as caught:
        call(value)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


def test_a_failed_init_leaves_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise RuntimeError("no seeds today")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    with pytest.raises(RuntimeError, match="no seeds today"):
        px.init(seed=1)
    assert not dist.is_initialized()
    monkeypatch.undo()
    with px.init(seed=1) as world:
        assert world.size == 1


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    import numpy

    sampler = px.ShardSampler(range(8), torch.tensor(2), numpy.int64(1), seed=numpy.int32(3))  # pyright: ignore[reportArgumentType]
    assert list(sampler) == list(px.ShardSampler(range(8), 2, 1, seed=3))
    assert px.compute_metrics() == {}
