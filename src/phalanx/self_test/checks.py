"""The checks of `phalanx test`, as each rank runs them: python -m phalanx.self_test.checks DIRECTORY NAME …

They use the public API alone, as a script would. Each compares with a reference that this rank computes by itself.
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
from phalanx.self_test.results import Result, results_path

_STEPS, _BATCH = 6, 16
_KILLED_AFTER = 3


def collectives(world: px.World) -> str:
    """Every collective of torch.distributed, on each device that the world serves."""
    devices = {torch.device("cpu"), world.device} if "gloo" in world.backend else {world.device}
    for device in sorted(devices, key=str):
        for check in (_reductions, _copies, _exchanges):
            check(world.rank, world.size, device)
    dist.barrier()
    return f"{world.backend} on {', '.join(sorted(map(str, devices)))}"


def _reductions(rank: int, size: int, device: torch.device) -> None:
    total = torch.full((1000,), float(sum(range(1, size + 1))), device=device)
    own = torch.full((1000,), float(rank + 1), device=device)
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, torch.full_like(total, float(size)))):
        found = own.clone()
        dist.all_reduce(found, op)
        _same(f"all_reduce on {device}", found, expected)
    found = own.clone()
    dist.reduce(found, 0)
    if rank == 0:
        _same(f"reduce on {device}", found, total)
    part = torch.empty(1000, device=device)
    dist.reduce_scatter_tensor(part, own.repeat(size))
    _same(f"reduce_scatter on {device}", part, total)


def _copies(rank: int, size: int, device: torch.device) -> None:
    found = torch.full((1000,), float(rank), device=device)
    dist.broadcast(found, size - 1)
    _same(f"broadcast on {device}", found, torch.full_like(found, float(size - 1)))
    ranks = torch.arange(size, device=device, dtype=torch.float32)
    gathered = torch.empty(size, device=device)
    dist.all_gather_into_tensor(gathered, ranks[rank : rank + 1])
    _same(f"all_gather on {device}", gathered, ranks)
    parts = [torch.empty(1, device=device) for _ in range(size)]
    dist.gather(ranks[rank : rank + 1], parts if rank == 0 else None)
    if rank == 0:
        _same(f"gather on {device}", torch.cat(parts), ranks)
    part = torch.empty(1, device=device)
    dist.scatter(part, list(ranks.split(1)) if rank == 0 else None)
    _same(f"scatter on {device}", part, ranks[rank : rank + 1])


def _exchanges(rank: int, size: int, device: torch.device) -> None:
    ranks = torch.arange(size, device=device, dtype=torch.float32)
    found = torch.empty(size, device=device)
    dist.all_to_all_single(found, ranks * 100 + rank)
    _same(f"all_to_all on {device}", found, ranks + rank * 100)
    if size > 1:
        ring = [
            dist.P2POp(dist.isend, ranks[rank : rank + 1].contiguous(), (rank + 1) % size),
            dist.P2POp(dist.irecv, part := torch.empty(1, device=device), (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        _same(f"send and recv on {device}", part, ranks[(rank - 1) % size : (rank - 1) % size + 1])


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
    _step(states[0].model, states[0].optimizer, _batch(0, world.device))  # type: ignore[attr-defined]
    with px.Checkpointer(directory) as checkpointer:
        checkpointer.save(states[0])
        checkpointer.wait()
        assert checkpointer.load_latest(states[1]), f"no checkpoint was found in {directory}"
    for name, value in states[0].model.state_dict().items():  # type: ignore[attr-defined]
        other = states[1].model.state_dict()[name]  # type: ignore[attr-defined]
        assert torch.equal(value, other), f"{name} is not what was saved"
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
            _step(model, optimizer, _share(state.step, world))
            state.step += 1
            checkpointer.save(state)
            checkpointer.wait()
            if attempt == 0 and state.step == _KILLED_AFTER and world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    assert attempt == 1, f"this is attempt {attempt + 1}, not the second one"
    assert first == _KILLED_AFTER, f"it resumed at step {first}, not at {_KILLED_AFTER}"
    _same_weights(model, _alone(world.device))
    return f"resumed at step {first}"


CHECKS: dict[str, Callable[[px.World], str]] = {
    function.__name__: function for function in (collectives, ddp, data_parallel, checkpoint, restart)
}


def _model(device: torch.device, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _batch(step: int, device: torch.device) -> Tensor:
    return torch.randn(_BATCH, 8, generator=torch.Generator().manual_seed(step)).to(device)


def _share(step: int, world: px.World) -> Tensor:
    return _batch(step, world.device)[world.rank :: world.size]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def _alone(device: torch.device) -> nn.Module:
    model = _model(device)
    optimizer = _optimizer(model)
    for step in range(_STEPS):
        _step(model, optimizer, _batch(step, device))
    return model


def _equal_to_one_process(world: px.World, model: nn.Module) -> str:
    optimizer = _optimizer(model)
    for step in range(_STEPS):
        _step(model, optimizer, _share(step, world))
    return f"largest difference {_same_weights(model, _alone(world.device)):.1g}"


def _same_weights(model: nn.Module, reference: nn.Module) -> float:
    pairs: Iterable[tuple[Tensor, Tensor]] = zip(model.parameters(), reference.parameters(), strict=True)
    difference = max((one - other).abs().max().item() for one, other in pairs)
    assert difference < 1e-4, f"the weights differ from those of one process by {difference:.3g}"
    return difference


def _same(name: str, found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected), f"{name} gave {found.flatten()[0]:g}, not {expected.flatten()[0]:g}"


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    with px.init(seed=0, timeout=60) as world, results_path(directory, world.rank).open("ab") as file:
        for name in names:
            started = time.perf_counter()
            try:
                detail, failed = CHECKS[name](world), False
            except Exception as error:  # noqa: BLE001 (a check that fails is what the table is for)
                detail, failed = f"{type(error).__name__}: {error}".splitlines()[0], True
            seconds = time.perf_counter() - started
            file.write(messages.encode(Result(name=name, failed=failed, seconds=seconds, detail=detail)) + b"\n")
            file.flush()
            if failed:  # the others may wait for this rank in a collective: the run ends here
                raise SystemExit(f"{name} failed: {detail}")


if __name__ == "__main__":
    main()
