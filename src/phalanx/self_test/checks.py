"""The checks of `phalanx test`, as each rank runs them: python -m phalanx.self_test.checks DIRECTORY STARTED NAME …

STARTED is when the command started the run. The checks use the public API as a script would, and compare with what
this rank computes by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx as px
from phalanx import messages
from phalanx.devices import accelerator
from phalanx.self_test.results import Result, results_path
from phalanx.system import procfs

_STEPS, _KILLED_AFTER, _ROWS = 6, 3, 8  # rows of each rank: DDP averages over ranks, and one process over rows


def start(world: px.World) -> str:
    """All ranks have joined, with these devices and versions."""
    if not accelerator.serves(world.device):
        return "on the CPU"
    functions = accelerator.module(world.device)
    name = getattr(functions, "get_device_name", lambda: world.device.type)()
    driver = next((word for word in procfs.nvidia_driver().split() if word[:1].isdigit()), "")
    nccl = ".".join(map(str, functions.nccl.version())) if "nccl" in world.backend else ""
    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "NCCL": nccl, "driver": driver}
    return f"{functions.device_count()} × {name}" + "".join(f", {key} {text}" for key, text in found.items() if text)


def collectives(world: px.World) -> str:
    """Every collective of torch.distributed, on each device that the world serves."""
    devices = {torch.device("cpu"), world.device} if "gloo" in world.backend else {world.device}
    for device in sorted(devices, key=str):
        for check in (_reductions, _copies, _exchanges):
            check(world.rank, world.size, device)
    dist.barrier()
    return f"{world.backend} on {', '.join(sorted(map(str, devices)))}"


def _reductions(rank: int, size: int, device: torch.device) -> None:
    own = torch.full((1000,), float(rank + 1), device=device)
    total = torch.full_like(own, size * (size + 1) / 2)
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, torch.full_like(own, float(size)))):
        dist.all_reduce(found := own.clone(), op)
        _same("all_reduce", found, expected)
    dist.reduce(found := own.clone(), 0)
    if rank == 0:
        _same("reduce", found, total)
    dist.reduce_scatter_tensor(found, own.repeat(size))
    _same("reduce_scatter", found, total)


def _copies(rank: int, size: int, device: torch.device) -> None:
    ranks = torch.arange(float(size), device=device)
    own = ranks[rank : rank + 1].clone()
    dist.broadcast(found := own.repeat(1000), size - 1)
    _same("broadcast", found, torch.full_like(found, float(size - 1)))
    dist.all_gather_into_tensor(found := torch.empty_like(ranks), own)
    _same("all_gather", found, ranks)
    parts = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
    dist.gather(own, parts)
    _same("gather", torch.cat(parts or [ranks]), ranks)
    dist.scatter(found := torch.empty_like(own), list(ranks.split(1)) if rank == 0 else None)
    _same("scatter", found, own)


def _exchanges(rank: int, size: int, device: torch.device) -> None:
    ranks = torch.arange(float(size), device=device)
    dist.all_to_all_single(found := torch.empty_like(ranks), ranks * 100 + rank)
    _same("all_to_all", found, ranks + rank * 100)
    after, before = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        receive = dist.P2POp(dist.irecv, found := torch.empty(1, device=device), before)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, ranks[rank : rank + 1].clone(), after), receive]):
            work.wait()
        _same("send and recv", found, ranks[before : before + 1])


def ddp(world: px.World) -> str:
    """torch's DistributedDataParallel trains as one process would."""
    index = [world.device.index] if world.device.index is not None else None
    model = DistributedDataParallel(_model(world.device), device_ids=index)
    return _equal_to_one_process(world, model)


def data_parallel(world: px.World) -> str:
    """px.data_parallel trains as one process would."""
    return _equal_to_one_process(world, px.data_parallel(_model(world.device)))


def checkpoint(world: px.World) -> str:
    """A state that was saved is loaded into another one, equal to the last bit."""
    directory = Path(sys.argv[1]) / "checkpoints"
    states = [px.State(model=(model := _model(world.device, seed)), optimizer=_optimizer(model)) for seed in (0, 1)]
    _step(states[0].model, states[0].optimizer, _batch(0, world))  # type: ignore[attr-defined]
    with px.Checkpointer(directory) as checkpointer:
        checkpointer.save(states[0])
        checkpointer.wait()
        _require(checkpointer.load_latest(states[1]) is not None, f"no checkpoint was found in {directory}")
    for name, value in states[0].model.state_dict().items():  # type: ignore[attr-defined]
        other = states[1].model.state_dict()[name]  # type: ignore[attr-defined]
        _require(torch.equal(value.cpu(), other.cpu()), f"{name} is not what was saved")
    return ""


def restart(world: px.World) -> str:
    """A rank is killed; the second attempt resumes from the last checkpoint, and ends as if nothing had happened."""
    model = px.data_parallel(_model(world.device))
    optimizer = _optimizer(model)
    state = px.State(model=model, optimizer=optimizer)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with px.Checkpointer(Path(sys.argv[1]) / "restart") as checkpointer:
        checkpointer.load_latest(state)
        first = state.step
        while state.step < _STEPS:
            _step(model, optimizer, _batch(state.step, world, world.rank, world.size))
            state.step += 1
            checkpointer.save(state)
            checkpointer.wait()
            if attempt == 0 and state.step == _KILLED_AFTER and world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    _require(attempt == 1, f"this is attempt {attempt + 1}, not the second one")
    _require(first == _KILLED_AFTER, f"it resumed at step {first}, not at {_KILLED_AFTER}")
    _same_weights(model, _alone(world))
    return f"resumed at step {first}"


CHECKS: dict[str, Callable[[px.World], str]] = {
    function.__name__: function for function in (start, collectives, ddp, data_parallel, checkpoint, restart)
}


def _model(device: torch.device, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _batch(step: int, world: px.World, first: int = 0, each: int = 1) -> Tensor:
    rows = torch.randn(_ROWS * world.size, 8, generator=torch.Generator().manual_seed(step))
    return rows[first::each].to(world.device)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def _alone(world: px.World) -> nn.Module:
    model = _model(world.device)
    optimizer = _optimizer(model)
    for step in range(_STEPS):
        _step(model, optimizer, _batch(step, world))
    return model


def _equal_to_one_process(world: px.World, model: nn.Module) -> str:
    optimizer = _optimizer(model)
    for step in range(_STEPS):
        _step(model, optimizer, _batch(step, world, world.rank, world.size))
    return f"largest difference {_same_weights(model, _alone(world)):.1g}"


def _same_weights(model: nn.Module, reference: nn.Module) -> float:
    pairs: Iterable[tuple[Tensor, Tensor]] = zip(model.parameters(), reference.parameters(), strict=True)
    difference = torch.stack([(one - other).abs().max() for one, other in pairs]).max().item()  # nan if one is
    _require(difference < 1e-4, f"the weights differ from those of one process by {difference:.3g}")
    return difference


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:  # not an assert, which PYTHONOPTIMIZE would drop
        raise AssertionError(otherwise)


def _same(name: str, found: Tensor, expected: Tensor) -> None:
    values = f"gave {found.flatten()[0]:g}, not {expected.flatten()[0]:g}"
    _require(torch.equal(found.cpu(), expected.cpu()), f"{name} on {found.device} {values}")


def main() -> None:
    directory, began, names = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    with px.init(seed=0, timeout=60) as world, results_path(directory, world.rank).open("ab") as file:
        for name in names:
            try:
                detail, failed = CHECKS[name](world), False
            except Exception as error:  # noqa: BLE001 (a check that fails is what the table is for)
                detail, failed = f"rank {world.rank}: {type(error).__name__}: {error}".splitlines()[0], True
            before, began = began, time.monotonic()
            result = Result(name, failed, began - before, detail, world.size, began)
            file.write(messages.encode(result) + b"\n")
            file.flush()
            if failed:  # the others may wait for this rank in a collective: the run ends here
                raise SystemExit(f"{name} failed: {detail}")
            px.barrier()  # so that nobody fails at the next one before all have told of this one


if __name__ == "__main__":
    main()
