"""The step at which ranks stop is the same for all, however they train."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import cycle
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY, start

STEPS = """
import contextlib, os, random, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from phalanx.preemption import stop_point, words
device = sys.argv[1]
if device == "sim":
    from tests.devices import sim, simccl
dist.init_process_group("simccl" if device == "sim" else "gloo")
rank, size, times = dist.get_rank(), dist.get_world_size(), int(sys.argv[2])
random.seed(rank)
stops, name, step = 0, "", 0

def handle(number, frame):
    global stops
    stops += 1
    clock = stop_point.current()._words[words.CLOCK]
    with open(f"stops-{rank}", "a") as file:
        file.write(f"{name} {step} {('collectives', 'steps')[clock]}\\n")

for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, handle)

def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4).to(device)

def ddp(group=None):
    return nn.parallel.DistributedDataParallel(linear(), process_group=group)

def mesh():
    from torch.distributed.device_mesh import init_device_mesh
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))

def tensor_parallel():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel as tp
    both = mesh()
    plan = {"0": tp.ColwiseParallel(), "1": tp.RowwiseParallel()}
    model = tp.parallelize_module(nn.Sequential(linear(), linear()), both["tp"], plan)
    return fully_shard(model, mesh=both["dp"])

def hsdp():
    from torch.distributed.fsdp import fully_shard
    return fully_shard(linear(), mesh=mesh())

def groups():
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    return ddp([dist.new_group(half) for half in halves][rank >= size // 2])

def pipeline(value):
    "Rank 0 has two messages in a step, those in the middle four."
    for source, to in ((rank - 1, rank + 1), (rank + 1, rank - 1)):
        if 0 <= source < size:
            dist.recv(value, source)
        if 0 <= to < size:
            dist.send(value, to)

MODELS = {"groups": groups, "hsdp": hsdp, "tensor_parallel": tensor_parallel, "local": linear, "pipeline": linear}
for name in sys.argv[3].split(","):
    model = MODELS.get(name, ddp)()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01)]
    if name == "extra" and rank == 0:
        optimizers += [torch.optim.SGD(linear().parameters(), lr=0.01) for _ in range(2)]
        optimizers += optimizers[:0:-1]
    until, step = stops + times, 0
    open(f"ready-{name}-{rank}", "w").close()
    while stops < until:
        step += 1
        parts = 3 if name == "accumulation" else 1
        for part in range(parts):
            with model.no_sync() if part < parts - 1 else contextlib.nullcontext():
                model(torch.randn(2, 4).to(device)).square().mean().backward()
        if name == "pipeline":
            pipeline(torch.zeros(1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if name == "local" and step % 4 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= size
        if name == "evaluation" and rank == 1 and step % 7 == 0:
            time.sleep(0.1)
        time.sleep(random.random() * 0.005)
    dist.barrier()
"""


def stops(directory: Path, device: str, cases: str, *flags: str, ranks: int = 4, times: int = 1) -> list[str]:
    """Signals a run at random moments, ``times`` in each of its cases; returns the lines of its ranks, all alike."""
    (directory / "train.py").write_text(STEPS)
    given = ("-m", "phalanx", "run", "--nproc-per-node", str(ranks), *flags, "train.py", device, str(times), cases)
    process = start(*given, cwd=directory, env={"PYTHONPATH": str(REPOSITORY)})
    files = [directory / f"stops-{rank}" for rank in range(ranks)]
    numbers, sent = cycle((signal.SIGUSR1, signal.SIGUSR2)), 0
    try:
        for case in cases.split(","):
            ready = [directory / f"ready-{case}-{rank}" for rank in range(ranks)]
            wait(lambda ready=ready: all(path.exists() for path in ready), process)
            for _ in range(times):
                time.sleep(random.uniform(0.5, 0.7))  # the same signal within a second is the same cause
                pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
                whom = random.choice(([pids[0]], pids, [random.choice(pids[-ranks:])]))
                number = next(numbers)
                for pid in whom:
                    os.kill(pid, number)
                sent += 1
                wait(lambda sent=sent: all(len(lines(file)) == sent for file in files), process)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    first, *others = [lines(file) for file in files]
    assert all(other == first for other in others)
    return first


def wait(condition, process, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        if time.monotonic() > limit:
            process.terminate()
            process.send_signal(signal.SIGINT)
            raise AssertionError(process.communicate())
        time.sleep(0.01)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


GLOO = ("--backend", "as-written")


@pytest.mark.parametrize(
    ("device", "cases", "clock", "flags"),
    [
        ("cpu", "extra,evaluation,accumulation", "collectives", ()),
        ("cpu", "groups,hsdp,local", "steps", GLOO),
        ("sim", "extra", "collectives", ()),
        *[
            ("cpu", "extra,evaluation,accumulation", "collectives", GLOO),
            ("cpu", "groups,hsdp,tensor_parallel,local", "steps", ()),
            ("cpu", "tensor_parallel", "steps", GLOO),
            ("sim", "groups", "steps", ()),
        ]
        * (os.environ.get("CONTACT") == "full"),
    ],
)
def test_all_ranks_stop_at_the_same_step(
    device: str, cases: str, clock: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    times = int(os.environ.get("STOPS", "1"))
    found = [line.split() for line in stops(tmp_path, device, cases, *flags, times=times)]
    assert [(case, by) for case, _, by in found] == [(case, clock) for case in cases.split(",") for _ in range(times)]
