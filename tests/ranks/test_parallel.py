"""data_parallel on real ranks: against DistributedDataParallel as it is, and against one process with all samples."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import UsageError
from phalanx.parallel import data_parallel, ddp
from phalanx.parallel.alone import OneProcess
from phalanx.world import World

RunRanks = Callable[..., list[Any]]
Check = Callable[[World], None]
CHECKS: dict[int, list[Check]] = {2: [], 3: []}


def on_ranks(*counts: int) -> Callable[[Check], Check]:
    """Such a check runs on every rank. All of them share a run: what DDP imports takes longer than any of them."""

    def add(check: Check) -> Check:
        for count in counts:
            CHECKS[count].append(check)
        return check

    return add


@pytest.mark.parametrize("ranks", CHECKS)
def test_on_ranks(ranks: int, run_ranks: RunRanks) -> None:
    """The traceback of a failure names the check."""

    def run_all(world: World) -> list[str]:
        torch.set_num_threads(1)  # the ranks share the cores
        done = []
        for check in CHECKS[world.size]:
            check(world)
            done.append(check.__name__)
        gc.collect()  # a DDP model that is still there makes the end of the group wait, with torch 2.13
        return done

    assert run_ranks(run_all, ranks, backend="shm") == [[check.__name__ for check in CHECKS[ranks]]] * ranks


class Net(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(12, 40)
        self.norm = norm(40)
        self.second = nn.Linear(40, 40)
        self.last = nn.Linear(40, 4)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last(x if skip else self.second(x).relu())


def batch(step: int, rank: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, rank: int, steps: int = 5) -> Tensor:
    """The weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def train_alone(model: nn.Module, ranks: int, steps: int = 5) -> Tensor:
    """The same in one process, which has the batches of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        model(torch.cat([batch(step, rank) for rank in range(ranks)])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def alike(tensor: Tensor, world: World) -> bool:
    """Whether all ranks have the same."""
    every = [torch.empty_like(tensor) for _ in range(world.size)]
    dist.all_gather(every, tensor)
    return all(torch.equal(tensor, each) for each in every)


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@on_ranks(2, 3)
def equal_to_ddp_bit_for_bit(world: World) -> None:
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        model = data_parallel(Net(nn.BatchNorm1d), process_group=group)
        assert model.gradient_as_bucket_view
        ours = train(model, world.rank)
        theirs = train(DistributedDataParallel(Net(nn.BatchNorm1d), process_group=group), world.rank)
        assert torch.equal(ours, theirs)
        assert alike(ours, world)
    assert distance(train(data_parallel(Net()), world.rank), train_alone(Net(), world.size)) < 1e-5


@on_ranks(2, 3)
def no_sync_adds_up_gradients_of_this_rank(world: World) -> None:
    model, raw, alone = data_parallel(Net()), DistributedDataParallel(Net()), Net()
    x = [batch(step, world.rank) for step in range(2)]
    for each in (model, raw):
        with each.no_sync():
            each(x[0]).square().mean().backward()
    alone(x[0]).square().mean().backward()
    assert torch.equal(gradients(model), gradients(alone))
    for each in (model, raw):
        each(x[1]).square().mean().backward()
    assert torch.equal(gradients(model), gradients(raw))
    assert alike(gradients(model), world)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten().clone() for each in model.parameters() if each.grad is not None])


@on_ranks(2)
def options_reach_ddp(world: World) -> None:
    model = data_parallel(Net(), static_graph=True, bucket_cap_mb=1)
    assert model.static_graph
    assert model.bucket_bytes_cap == 2**20
    assert torch.equal(train(model, world.rank), train(DistributedDataParallel(Net()), world.rank))
    with data_parallel(Net()).join():
        pass


@on_ranks(2)
def slips_are_told(world: World) -> None:
    with pytest.raises(UsageError, match="wrapped already"):
        data_parallel(data_parallel(Net()))
    with pytest.raises(UsageError, match=f"for one process, and this is rank {world.rank} of {world.size}; use 'ddp'"):
        data_parallel(Net(), "dp")
    with pytest.raises(UsageError, match="no parameter of the Net wants a gradient"):
        data_parallel(Net().requires_grad_(False))


# ---- switches


@on_ranks(2)
def compression(world: World) -> None:
    """It changes the gradients, but not by much; PowerSGD from its step on."""
    ddp.POWERSGD_START = 3
    whole, early = (train(data_parallel(Net()), world.rank, steps) for steps in (8, 2))
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        for name in ("bf16", "fp16", "powersgd"):
            ours = train(data_parallel(Net(), compress=name, process_group=group), world.rank, 8)
            assert alike(ours, world), name
            assert 0 < distance(ours, whole) < 0.05, f"{name}: {distance(ours, whole)}"
        first = train(data_parallel(Net(), compress="powersgd", process_group=group), world.rank, 2)
        assert distance(first, early) < 1e-6


@on_ranks(2)
def powersgd_with_unused_parameters_has_no_nan(world: World) -> None:
    """And several buckets are not mixed up by gloo, nor is what finds the unused ones."""
    ddp.POWERSGD_START = 2
    group = dist.new_group(backend="gloo")
    model = data_parallel(Net(), compress="powersgd", find_unused=True, process_group=group, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(batch(step, world.rank), skip=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weights(model).isfinite().all()


@on_ranks(2, 3)
def sync_batchnorm_is_the_batchnorm_of_all_samples(world: World) -> None:
    kinds: list[dict[str, Any]] = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
    for options in kinds:

        def norm(features: int, options: dict[str, Any] = options) -> nn.Module:
            return nn.BatchNorm1d(features, **options)

        model, alone = data_parallel(Net(norm), sync_batchnorm=True), Net(norm)
        assert distance(train(model, world.rank), train_alone(alone, world.size)) < 1e-5
        for (name, mine), its in zip(model.module.named_buffers(), alone.buffers(), strict=True):
            assert torch.allclose(mine, its, atol=1e-6), f"{options}: {name}"
        for each in (model, alone):
            each.eval()
        assert distance(model(batch(9, 0)), alone(batch(9, 0))) < 1e-5
        alone.load_state_dict(model.state_dict())


@on_ranks(2, 3)
def sync_batchnorm_of_images_and_uneven_batches(world: World) -> None:
    torch.manual_seed(0)
    images = torch.randn(5, 3, 4, 4).double()
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2)).double()
    model = data_parallel(copy.deepcopy(plain), sync_batchnorm=True)
    rows = slice(world.rank, world.rank + 1) if world.rank + 1 < world.size else slice(world.rank, None)
    mine, whole = images[rows].clone().requires_grad_(), images.clone().requires_grad_()
    model(mine).square().sum().backward()
    plain(whole).square().sum().backward()
    assert mine.grad is not None
    assert whole.grad is not None
    assert distance(mine.grad, whole.grad[rows]) < 1e-12
    assert distance(gradients(model) * world.size, gradients(plain)) < 1e-12  # DDP gives the mean over the ranks


@on_ranks(2)
def sync_batchnorm_in_half_precision(world: World) -> None:
    torch.manual_seed(0)
    model = data_parallel(nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)), sync_batchnorm=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch(0, world.rank))
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    assert gradients(model).isfinite().all()


@on_ranks(2)
def missing_gradients_are_named(world: World) -> None:
    kinds: list[dict[str, Any]] = [{}, {"mode": "replicate", "devices": 2}]
    for options in kinds:
        model = data_parallel(Net(), **options)
        model(batch(0, world.rank), skip=True).sum().backward()
        with pytest.raises(UsageError) as caught:
            model(batch(1, world.rank), skip=True)
        assert str(caught.value) == (
            f"second.weight, second.bias got no gradient in the last step on rank {world.rank}, so it was never "
            "finished; give data_parallel find_unused=True, freeze them with requires_grad_(False), or use them in "
            "the loss."
        )
        del model, caught
    model = data_parallel(Net(), find_unused=True)
    for step in range(3):
        model(batch(step, world.rank), skip=step != 1).sum().backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))


@on_ranks(2)
def compiled(world: World) -> None:
    model = torch.compile(data_parallel(Net()), backend="aot_eager")
    plain = train(data_parallel(Net()), world.rank, 3)
    assert distance(train(model, world.rank, 3), plain) < 1e-6  # type: ignore[arg-type]


# ---- state dicts


@on_ranks(2)
def state_dicts_in_all_directions(world: World) -> None:
    bare, other = Net(nn.BatchNorm1d), Net(nn.BatchNorm1d)
    for parameter in bare.parameters():
        nn.init.normal_(parameter)
    kinds: list[dict[str, Any]] = [{}, {"mode": "replicate", "devices": 2}]
    for options in kinds:
        ours, raw = data_parallel(Net(nn.BatchNorm1d), **options), DistributedDataParallel(Net(nn.BatchNorm1d))
        assert list(ours.state_dict()) == list(bare.state_dict())
        ours.load_state_dict(bare.state_dict())
        assert torch.equal(weights(ours), weights(bare))
        other.load_state_dict(ours.state_dict())
        assert torch.equal(weights(other), weights(bare))
        nn.init.ones_(raw.module.first.weight)
        ours.load_state_dict(raw.state_dict())  # with the prefix
        assert torch.equal(weights(ours), weights(raw))
        ours.load_state_dict(ours.state_dict())
        with pytest.raises(RuntimeError, match=r"Unexpected key.*more"):
            ours.load_state_dict({**bare.state_dict(), "more": torch.ones(1)})
        pair = nn.ModuleDict({"a": ours, "b": nn.Linear(2, 2)})  # as a part of another model
        plain = nn.ModuleDict({"a": Net(nn.BatchNorm1d), "b": nn.Linear(2, 2)})
        assert set(pair.state_dict()) == set(plain.state_dict())
        pair.load_state_dict(plain.state_dict())
        plain.load_state_dict(pair.state_dict())
        assert torch.equal(weights(ours), weights(plain["a"]))


@on_ranks(2)
def torchs_checkpoint_functions(world: World) -> None:
    """They know how DDP names parameters, so they are given the model inside."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = data_parallel(Net())
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(0, world.rank)).sum().backward()
    optimizer.step()
    for_model, for_optimizer = get_state_dict(model.module, optimizer)
    assert list(for_model) == list(Net().state_dict())
    set_state_dict(model.module, optimizer, model_state_dict=for_model, optim_state_dict=for_optimizer)


# ---- several devices in one process


@on_ranks(2, 3)
def replicate_and_split_under_ddp(world: World) -> None:
    expected = train_alone(Net(), world.size)
    copies = data_parallel(Net(), "replicate", devices=2)
    assert isinstance(copies, DistributedDataParallel)
    assert isinstance(copies.module, OneProcess)
    parts = {"first": "cpu:0", "norm": "cpu:0", "second": "cpu:1", "last": "cpu:1"}
    model = data_parallel(Net(), "split", parts=parts)
    assert isinstance(model, DistributedDataParallel)
    assert model.device_ids is None
    for each in (copies, model):
        assert distance(train(each, world.rank), expected) < 1e-5
    torch.manual_seed(4)
    layers = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 4))
    alone = train_alone(copy.deepcopy(layers), world.size)
    halves = data_parallel(layers, "split", devices=["cpu:0", "cpu:1"])
    assert distance(train(halves, world.rank), alone) < 1e-5


# ---- without px.init


def test_with_plain_torch(run_ranks: RunRanks) -> None:
    """Rank and size come from torch.distributed."""

    def check(rank: int, address: str) -> bool:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        same = torch.equal(train(data_parallel(Net()), rank), train(DistributedDataParallel(Net()), rank))
        gc.collect()
        dist.destroy_process_group()
        return same

    with tempfile.TemporaryDirectory() as place:
        assert run_ranks(check, 2, f"file://{place}/meet", join_group=False) == [True, True]


def test_not_joined(run_ranks: RunRanks) -> None:
    with pytest.raises(ProcessRaisedException, match=r"has not joined yet; call px.init\(\) first"):
        run_ranks(lambda _: data_parallel(Net()), 2, join_group=False)
