"""The device of a rank and the backend that serves it, on a torch.cuda whose calls are counted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx import backends, world
from phalanx.devices import accelerator
from phalanx.errors import UsageError
from phalanx.store import join
from phalanx.store.join import Claim


@dataclass
class Cuda:
    """What the fake driver has, and what was done to it."""

    count: int = 4
    current: int | None = None
    """The device of the script; None before it has used one."""
    set_to: list[int] = field(default_factory=list)
    asked_for: list[dict[str, Any]] = field(default_factory=list)
    """The arguments of each init_process_group."""

    def set_device(self, index: int) -> None:
        self.set_to.append(index)
        self.current = index


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """torch.cuda as on a machine with GPUs; a process group of nccl becomes one of gloo."""
    fake = Cuda()
    plain = dist.init_process_group

    def init_process_group(backend: str, **options: Any) -> None:
        fake.asked_for.append({"backend": backend, **options})
        plain("gloo", **{name: value for name, value in options.items() if name != "device_id"})

    def current_device() -> int:
        if fake.current is None:
            fake.current = 0  # a context on the first GPU
        return fake.current

    for name, value in {
        "is_available": lambda: fake.count > 0,
        "device_count": lambda: fake.count,
        "set_device": fake.set_device,
        "current_device": current_device,
        "is_initialized": lambda: fake.current is not None,
        "get_device_properties": lambda device: SimpleNamespace(
            name="H100", major=9, uuid=f"uuid-{getattr(device, 'index', device)}"
        ),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda") if fake.count else None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: fake.count > 0)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(backends, "install", lambda: None)  # it patches torch for good
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PHALANX_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    yield fake
    if dist.is_initialized():
        dist.destroy_process_group()


def use_everything() -> None:
    px.barrier()
    list(px.track([torch.ones(1)]))
    px.Mean().update(torch.ones(1))
    px.State(model=torch.nn.Linear(1, 1))
    with px.autocast():
        pass


def test_only_init_chooses_the_device(cuda: Cuda) -> None:
    torch.distributed.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    use_everything()
    assert (cuda.set_to, cuda.current) == ([], None), "a script on the CPU gets no context"
    assert world.current().device == torch.device("cpu")
    torch.cuda.set_device(3)
    use_everything()
    assert cuda.set_to == [3], "the script's own choice"
    assert world.current().device == torch.device("cuda", 3)
    dist.destroy_process_group()
    with px.init(rank=0, world_size=1, store=dist.HashStore()) as joined:
        assert joined.device == torch.device("cuda", 0)
        use_everything()
    assert cuda.set_to == [3, 0]


def test_a_group_that_is_bound_to_a_device_tells_it(cuda: Cuda) -> None:
    torch.distributed.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = torch.device("cuda", 2)
    assert (world.current().device, cuda.set_to) == (torch.device("cuda", 2), [])


@pytest.mark.parametrize(
    ("backend", "bound"),
    [("gloo", None), (None, "cuda:1"), ("nccl", "cuda:1"), ("cpu:gloo,cuda:nccl", "cuda:1"), ("cuda:gloo", None)],
)
def test_a_group_is_bound_to_a_device_that_its_backend_serves(
    backend: str | None, bound: str | None, cuda: Cuda
) -> None:
    with px.init(backend, rank=0, world_size=1, store=dist.HashStore(), device="cuda:1"):
        (asked,) = cuda.asked_for
    assert asked.get("device_id") == (torch.device(bound) if bound else None)
    assert asked["backend"] == (backend or "cpu:gloo,cuda:nccl")


def test_the_gloo_group_of_a_few_ranks_does_not_split_the_world(cuda: Cuda) -> None:
    torch.distributed.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = dist.group.WORLD
    assert whole is not None
    whole.bound_device_id = device = torch.device("cuda", 0)
    seen = []

    def make(group_size: int, group_rank: int, global_ranks_in_group: list[int], backend: str, store: Any) -> Any:
        # torch lets ranks outside of the new group split the communicator if the world is bound to a device.
        seen.append(whole.bound_device_id)
        return None, None

    for backend in ("gloo", "cpu:gloo", "nccl", "cpu:gloo,cuda:nccl"):
        backends._choosing(make)(1, 0, [0], backend, None)
    assert seen == [None, None, device, device]
    assert whole.bound_device_id == device

    def fail(group_size: int, group_rank: int, global_ranks_in_group: list[int], backend: str, store: Any) -> Any:
        raise RuntimeError("no group")

    with pytest.raises(RuntimeError, match="no group"):
        backends._choosing(fail)(1, 0, [0], "gloo", None)
    assert whole.bound_device_id == device


def test_ranks_that_share_a_gpu_are_named() -> None:
    claims = [Claim(rank, 4, "a", 100 + rank, 1, f"boot-{rank // 2}", note) for rank, note in enumerate("xyxx")]
    with pytest.raises(UsageError, match="ranks 2 and 3 have the same GPU on host a; start one rank for each"):
        join.check_devices(claims)
    join.check_devices(claims[:3])  # rank 2 is on another machine
    join.check_devices([Claim(rank, 2, "a", rank + 1, 1, "boot") for rank in range(2)])


def test_each_task_may_see_one_gpu_alone(cuda: Cuda) -> None:
    cuda.count = 1
    assert accelerator.choose(None, local_rank=3, world_size=4) == torch.device("cuda", 0)
    with pytest.raises(UsageError, match=r"device cuda:1 was asked for, but torch sees 1 GPU.*free a GPU"):
        accelerator.choose(torch.device("cuda:1"), local_rank=0, world_size=1)


def test_a_driver_that_is_too_old_for_torch(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # NVML counts its GPUs all the same
    assert accelerator.choose(None, 0, 1) == torch.device("cpu")
    with pytest.raises(
        UsageError, match=r"device cuda was asked for, but torch sees 0 GPU.*or install a torch that is built for it"
    ):
        accelerator.choose(torch.device("cuda"), 0, 1)
    assert cuda.set_to == []


def test_a_part_of_a_gpu_has_no_number_of_its_own(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.identity(torch.device("cuda", 2)) == "uuid-2"
    part = SimpleNamespace(name="NVIDIA A100 MIG 1g.5gb", uuid="that of the GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: part)
    assert accelerator.identity(torch.device("cuda", 2)) == ""


def test_mps_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    one = accelerator.choose(None, 0, 1)
    assert (one, accelerator.default_backend(one)) == (torch.device("mps"), "gloo")
    assert accelerator.choose(None, 0, 2) == torch.device("cpu")
    with pytest.raises(UsageError, match="device mps is for one process, and there are 2; use cpu"):
        accelerator.choose(torch.device("mps"), 0, 2)


def test_the_default_backend_is_torchs_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, backend in {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.items():
        assert accelerator.default_backend(torch.device(kind)) == backend
    with pytest.raises(UsageError, match="torch has no backend for vulkan; import the package"):
        accelerator.default_backend(torch.device("vulkan"))


def test_gloo_asks_nvml_whether_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)

    def initialise() -> int:
        raise AssertionError("cuInit in a process that may still fork")

    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", initialise, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for count in (2, 0):
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda count=count: count)
        assert backends._has_gpus() == (count > 0)
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def test_a_torch_before_the_accelerator_interface(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "accelerator")
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    assert (accelerator.kind(), accelerator.choose(None, 2, 4)) == ("cuda", torch.device("cuda", 2))
    cuda.count = 0
    assert accelerator.choose(None, 2, 4) == torch.device("cpu")
