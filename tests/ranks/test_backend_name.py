"""What torch answers about a group that is shm instead of gloo: as gloo would, in every question that programs ask."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from phalanx import world as worlds
from phalanx.shm import ShmGroup
from phalanx.status import notices
from tests.conftest import Runner


def _names(group: Any) -> list[str]:
    """Every place where torch has the name of a group's backend."""
    return [
        *(dist.get_backend(group), dist.get_backend_config(group), group._get_backend_name(), group.name()),
        *(c10d._world.pg_map[group][0], c10d._world.pg_backend_config[group], str(group).partition(" at ")[0]),
        repr(group).partition(" at ")[0],
    ]


def _groups(is_full: bool) -> Iterator[Any]:
    """The world, and what is made later without a backend's name, and with the one that torch has given."""
    from torch.distributed.device_mesh import init_device_mesh

    yield c10d._get_default_group()
    yield dist.new_group(backend=dist.get_backend())
    if not is_full:
        return
    yield dist.new_group()
    yield dist.new_group(backend="gloo")
    yield dist.new_group(backend=dist.get_backend_config())
    yield dist.new_group([1, 0], use_local_synchronization=True)
    yield dist.new_subgroups(1)[0]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    yield mesh.get_group("replicas")
    yield mesh.get_group("shards")


# How public projects ask, in words of our own; each had another result with shm's own name.
PATTERNS: dict[str, Callable[[], Any]] = {
    "ignite: wrap in DDP": lambda: dist.get_backend() in ("nccl", "gloo", "mpi"),
    "lightning: inference_mode": lambda: dist.get_backend() != "gloo",
    "fabric: reduce by average": lambda: dist.get_backend(dist.group.WORLD) == "gloo",
    "detectron2: device of pickled data": lambda: {"gloo": "cpu", "nccl": "cuda"}[dist.get_backend()],
    "detectron2: a group for objects": lambda: dist.get_backend() == "nccl",
    "mmengine: device of collectives": lambda: {"hccl": "npu", "cncl": "mlu", "gloo": "cpu"}.get(dist.get_backend()),
    "transformers: pipeline on CPUs": lambda: dist.get_backend(dist.group.WORLD) == "gloo",
    "colossalai: device of a chunk": lambda: "gloo" in str(dist.get_backend()),
    "torch's enum": lambda: dist.get_backend() is dist.Backend.GLOO,
    "megatron: by the configuration": lambda: "cpu:gloo" in dist.get_backend_config(),
    "by the devices of a backend": lambda: dist.Backend.backend_capability[dist.get_backend()],
}


def _torchs_own(rank: int) -> dict[str, Any]:
    """Where torch itself takes another way for gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.nn.functional import all_to_all
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found: dict[str, Any] = {}
    blocks = [torch.full((2,), float(rank * 10 + other), requires_grad=True) for other in range(2)]
    out = all_to_all([torch.empty(2), torch.empty(2)], blocks)
    (out[0] * 2 + out[1] * 3).sum().backward()
    found["all_to_all"] = [*out[0].tolist(), *out[1].tolist()]
    found["its gradients"] = [block.grad.tolist() for block in blocks if block.grad is not None]
    model = DistributedDataParallel(nn.Linear(2, 1))
    found["DDP"] = model._get_ddp_logging_data()["backend_name"]
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, parameters_as_bucket_view=False, lr=0.1
    )
    with pytest.raises(RuntimeError) as refusal:
        ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
    found["ZeRO with overlap"] = str(refusal.value)
    dist.monitored_barrier()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    with pytest.raises(RuntimeError) as refusal:
        dist.split_group(split_ranks=[[0], [1]])
    found["split_group"] = str(refusal.value)
    return found


def _ask(rank: int, asked: str | None, choice: str, file: Path) -> tuple[dict[str, Any], list[bool]]:
    os.environ["PHALANX_BACKEND"] = choice
    dist.init_process_group(asked, init_method=f"file://{file}", rank=rank, world_size=2)
    groups = list(_groups(asked == "gloo"))
    answers: dict[str, Any] = {"names": [_names(group) for group in groups], "all": c10d._world.pg_config_info}
    if asked == "gloo":
        answers |= {name: pattern() for name, pattern in PATTERNS.items()} | _torchs_own(rank)
    kinds = [isinstance(group, ShmGroup) for group in groups]
    answers["sum"] = []
    for group in groups:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        answers["sum"].append(total.item())
    kinds.append(worlds.current().backend == "shm")
    dist.destroy_process_group()
    return answers, kinds


def test_torch_answers_as_for_gloo_and_later_groups_are_shm_too(run_ranks: Any, tmp_path: Path) -> None:
    def ask(rank: int) -> list[Any]:
        return [
            [_ask(rank, asked, choice, tmp_path / f"{asked} {choice}") for choice in ("auto", "as-written")]
            for asked in ("gloo", None, "cpu:gloo", "GLOO")
        ]

    for spellings in run_ranks(ask, 2, join_group=False):
        for (ours, are_ours), (torchs, are_torchs) in spellings:
            assert ours == torchs
            assert all(are_ours)
            assert not any(are_torchs)
        assert spellings[0][0][0]["all_to_all"] in ([0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 11.0, 11.0])


def test_a_script_that_says_shm_sees_shm_and_its_gloo_is_gloo(run_ranks: Any) -> None:
    def ask(world: Any) -> list[Any]:
        groups = [dist.group.WORLD, dist.new_group(), dist.new_group(backend="gloo")]
        return [world.backend, *((_names(group)[0], isinstance(group, ShmGroup)) for group in groups)]

    said = ["shm", ("shm", True), ("shm", True), ("gloo", False)]
    assert run_ranks(ask, 2, backend="shm") == [said] * 2


def test_px_init_without_a_backend_says_shm_and_torch_gloo(run_ranks: Any) -> None:
    def ask(world: Any) -> list[Any]:
        c10d._set_pg_timeout(timedelta(seconds=77))  # of any group of torch's
        return [world.backend, dist.get_backend(), worlds.current().backend, world.group.timeout.total_seconds()]

    assert run_ranks(ask, 2) == [["shm", "gloo", "shm", 77.0]] * 2


LINE = "phalanx: the backend is shm, not gloo: all 2 ranks are on this machine (--backend as-written keeps gloo)"


def test_the_agent_says_the_choice_once_in_a_run(phalanx: Runner, script: Callable[..., str], latest: Path) -> None:
    """Not again after a restart, not as a line of rank 0, and even when that rank is not shown."""
    train = script("""
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        raise SystemExit(int(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))
    """)
    ran = phalanx("run", "--nproc-per-node", "2", "--max-restarts", "1", "--local-ranks-filter", "1", train)
    assert ran.code == 0, ran.err
    assert [line for line in ran.err.splitlines() if "the backend is" in line] == [LINE]
    assert "the backend is" not in (latest / "rank-0.log").read_text()


def test_a_notebook_says_it_once_not_in_every_cell(
    run_ranks: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_given", set())
    for _ in range(2):
        run_ranks(lambda world: None, 2)
    assert capsys.readouterr().err == f"{LINE}\n"
