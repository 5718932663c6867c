"""What a training script does, on two ranks with the device "sim". `test_training.py` runs it under `phalanx run`.

Each section asserts; the ones that train compare with the same training in one process.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px
from phalanx.checkpoint.storage.shard_file import DeferredTensor, ShardReader
from tests.devices import sim, sim_batchnorm, simccl

BATCH, STEPS = 8, 4
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).to("sim")


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 1, generator=generator)


def part(tensor: Tensor, world: px.World) -> Tensor:
    share = len(tensor) // world.size
    return tensor[world.rank * share : (world.rank + 1) * share].to(world.device)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).float(), y)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def in_one_process(make: Optimizers, together: int = 1) -> Tensor:
    """The weights after all batches, ``together`` of them in each step."""
    model = net()
    optimizer = make(model.parameters())
    for step in range(0, STEPS, together):
        batches = [data(number) for number in range(step, step + together)]
        x, y = (torch.cat(tensors).to("sim") for tensors in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return flat(model)


def check_weights(model: nn.Module, expected: Tensor) -> None:
    """They are those of one process, and the same bits on all ranks."""
    own = flat(model)
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
    rows = [torch.empty_like(own, device="sim") for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own.to("sim"))
    assert all(torch.equal(row.cpu(), own) for row in rows)


# ---- the sections


def ddp(world: px.World) -> None:
    for wrap in (DistributedDataParallel, px.data_parallel):
        for make in (adam, sgd):
            model = wrap(net())
            optimizer = make(model.parameters())
            for step in range(STEPS):
                x, y = data(step)
                optimizer.zero_grad()
                loss_of(model, part(x, world), part(y, world)).backward()
                optimizer.step()
            check_weights(model, in_one_process(make))


def batch_norm(world: px.World) -> None:
    """Statistics of all ranks, by torch's own SyncBatchNorm."""
    sim_batchnorm.register()
    x, y = data(0)
    found = []
    for is_alone in (True, False):
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to("sim")
        model = bare if is_alone else px.data_parallel(bare, sync_batchnorm=True)
        inputs = (x.to("sim"), y.to("sim")) if is_alone else (part(x, world), part(y, world))
        loss_of(model, *inputs).backward()
        norm = model.get_submodule("1" if is_alone else "module.1")
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append([each.cpu() for each in (*gradients, norm.running_mean, norm.running_var)])
    assert type(norm) is nn.SyncBatchNorm
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def compression(world: px.World) -> None:
    """torch allows bf16 for NCCL and XCCL alone, by the hook's name."""
    model = px.data_parallel(net(), compress="bf16")
    x, y = data(0)
    loss_of(model, part(x, world), part(y, world)).backward()


def accumulated(world: px.World) -> None:
    model = px.data_parallel(net())
    optimizer = sgd(model.parameters())
    parts = px.accumulate(model, every=2)
    for step in px.track(range(STEPS), epoch=0, quiet=True):
        x, y = data(step)
        with parts:
            (loss_of(model, part(x, world), part(y, world)) / parts.size).backward()
        if parts.complete:
            optimizer.step()
            optimizer.zero_grad()
    check_weights(model, in_one_process(sgd, together=2))


def loader_of(world: px.World) -> tuple[DataLoader[tuple[Tensor, ...]], px.ShardSampler]:
    xs, ys = zip(*(data(step) for step in range(STEPS)), strict=True)
    dataset = TensorDataset(torch.cat(xs), torch.cat(ys))
    sampler = px.ShardSampler(dataset, shuffle=False)
    return DataLoader(dataset, batch_size=BATCH // world.size, sampler=sampler), sampler


def batches(world: px.World) -> None:
    """They are copied beside the kernels that are queued, and the kernels of the step wait for them."""
    loader, _ = loader_of(world)
    expected = [x for x, _ in loader]
    tracked = iter(px.track(loader, epoch=0, device="sim", quiet=True))
    sim.device.hold()
    x, _ = next(tracked)
    sim.device.streams[-1].synchronize()
    assert sim.device.streams[-1] is not sim.device.default
    assert torch.equal(sim.values(sim.buffer(x)), expected[0]), "copied, although the kernels before are stuck"
    assert (sim.buffer(x), sim.device.default.stream_id) in sim.device.shared, "its memory is not reused too early"
    sim.device.release()
    for number, (x, _) in enumerate(tracked, start=1):
        assert torch.equal((x + 0).cpu(), expected[number])
        sim.device.delay = 0.02  # the next copy is slower than the kernel that reads it
    sim.device.delay = 0.0


def dropping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)).to("sim")


class Run:
    """A model in mixed precision, with everything that a checkpoint holds."""

    def __init__(self, world: px.World) -> None:
        self.loader, sampler = loader_of(world)
        self.model = px.data_parallel(dropping())
        self.optimizer, self.amp = adam(self.model.parameters()), px.autocast("fp16")
        self.state = px.State(
            model=self.model, optimizer=self.optimizer, sampler=sampler, extra={"amp": self.amp, "kept": "a text"}
        )

    def epoch(self, number: int) -> None:
        for x, y in px.track(self.loader, epoch=number, device="sim", quiet=True):
            with self.amp:
                loss = loss_of(self.model, x, y)
            self.amp.backward(loss)
            self.amp.step(self.optimizer)
            self.optimizer.zero_grad()
            px.log(loss=loss)


@contextlib.contextmanager
def counted_reads() -> Iterator[list[weakref.ref[Tensor]]]:
    """The tensors that are read from a checkpoint; no two of them are on the host at a time."""
    reads: list[weakref.ref[Tensor]] = []
    plain = ShardReader.read

    def counted(reader: ShardReader, name: str) -> Tensor:
        found = plain(reader, name)
        if isinstance(found, DeferredTensor) and found.shape:
            read = found.read

            def read_alone() -> Tensor:
                assert not any(each() is not None for each in reads)
                tensor = read()
                reads.append(weakref.ref(tensor))
                return tensor

            found.read = read_alone
        return found

    with mock.patch.object(ShardReader, "read", counted):
        yield reads


def resumed(world: px.World) -> None:
    """A run that ends after an epoch and resumes has the bits of one that goes on: the device's generator too."""
    run = Run(world)
    with px.Checkpointer("checkpoints") as checkpointer:
        run.epoch(0)
        run.state.step = 1
        checkpointer.save(run.state)
        run.epoch(1)
    again = Run(world)
    torch.manual_seed(world.rank)  # the device's generator too
    with px.Checkpointer("checkpoints") as checkpointer:
        with counted_reads() as reads:
            assert checkpointer.load_latest(again.state) is again.state
        assert len(reads) == 18, "six parameters, and two moments of each"
        assert again.state.step == 1
        assert again.state.extra["kept"] == "a text"
        moments = [each["exp_avg"].device.type for each in again.optimizer.state.values()]
        assert moments == ["sim"] * 6
        again.epoch(1)
    assert torch.equal(flat(again.model), flat(run.model))


def saved_meanwhile(world: px.World) -> None:
    """A save waits for nothing on the device, nor does the step after it; and it has the state of its moment."""
    run = Run(world)
    run.epoch(0)
    x, y = data(0)
    with px.Checkpointer("meanwhile") as checkpointer:
        checkpointer.save(1, model=run.model, optimizer=run.optimizer)  # the first one agrees on a lock
        checkpointer.wait()
        expected = flat(run.model)
        synchronized = sim.device.synchronized
        limit = threading.Timer(10.0, sim.device.release)
        limit.start()
        sim.device.hold()
        began = time.monotonic()
        checkpointer.save(2, model=run.model, optimizer=run.optimizer)
        loss_of(run.model, part(x, world), part(y, world)).backward()
        run.optimizer.step()
        seconds = time.monotonic() - began
        limit.cancel()
        sim.device.release()
        assert seconds < 5.0, f"it took {seconds:.1f} s: until the device was released"
        assert sim.device.synchronized == synchronized
        checkpointer.wait()
        assert not torch.equal(flat(run.model), expected)
        checkpointer.load(2, model=run.model)
    assert torch.equal(flat(run.model), expected)


def scaled(world: px.World) -> None:
    """Two optimizers and one scaler; a gradient that overflows on one rank is skipped on both."""
    amp = px.autocast("fp16")
    model = px.data_parallel(net())
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in linear]
    before, scale = flat(model), amp.scaler.get_scale()
    for step in range(2):
        x, y = data(step)
        with amp:
            assert model(part(x, world)).dtype is torch.float16
            loss = loss_of(model, part(x, world), part(y, world)) / 100  # so that half precision suffices
        amp.backward(loss * (float("inf") if step == 0 and world.rank == 1 else 1.0))
        for optimizer in optimizers:
            amp.clip(optimizer, max_norm=1.0)
        amp.step(*optimizers)
        if step == 0:
            assert torch.equal(flat(model), before)
            assert amp.scaler.get_scale() == scale / 2
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert amp.scaler.get_scale() == scale / 2
    assert not torch.equal(flat(model), before)
    check_weights(model, flat(model))
    # As a V100 answers.
    torch.get_device_module("sim").is_bf16_supported = lambda including_emulation=True: including_emulation
    assert px.autocast().dtype is torch.float16


def metrics(world: px.World) -> None:
    mean = px.Mean()
    mean.update(torch.full((world.rank + 1,), float(world.rank), device="sim"))
    assert mean.compute() == 2 / 3
    px.barrier()
    with px.rank_zero_first():
        torch.ones(2, device="sim").sum().item()


def main() -> None:
    with px.init(device="sim", backend=simccl.NAME, seed=0) as world:
        assert world.device.type == "sim"
        for section in (ddp, batch_norm, compression, accumulated, batches, resumed, saved_meanwhile, scaled, metrics):
            began = time.monotonic()
            section(world)
            print(f"passed: {section.__name__} {time.monotonic() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main()
