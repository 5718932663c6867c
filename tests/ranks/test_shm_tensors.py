"""Tensors that are not a piece of memory: what stands for one is unwrapped, anything else is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import UsageError
from phalanx.native import library
from phalanx.parallel import data_parallel
from phalanx.world import World

RunRanks = Callable[..., list[Any]]


class Wrapper(Tensor):
    """A tensor that has another one inside and no memory of its own."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)  # type: ignore[attr-defined]
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.inside if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except UsageError as error:
        return str(error)
    return "nothing"


def functional_result(value: float) -> Tensor:
    import torch.distributed._functional_collectives as functional

    result = functional.all_reduce(torch.full((4,), value), "sum", dist.group.WORLD)  # type: ignore[arg-type]
    assert type(result).__name__ == "AsyncCollectiveTensor"
    assert not result.data_ptr()
    return result


def use_functional_results(world: World) -> list[Any]:
    n = world.size
    in_place, sent, scattered = (functional_result(1.0) for _ in range(3))
    dist.all_reduce(in_place)
    outputs = [torch.zeros(4) for _ in range(n)]
    dist.all_gather(outputs, functional_result(world.rank + 1.0))
    dist.broadcast(sent, 0)
    dist.reduce_scatter(scattered, [functional_result(1.0) for _ in range(n)])
    received = functional_result(0.0)
    if world.rank == 0:
        dist.send(sent, 1)
    else:
        dist.recv(received, 0)
    work = dist.all_reduce(later := functional_result(1.0), async_op=True)
    assert work is not None
    work.wait()
    return [tensor.tolist() for tensor in (in_place, *outputs, sent, scattered, later, received)]


def use_zeros(world: World) -> list[Any]:
    """torch's tensors of zeros that take no memory can be read, and hold the result if that is zero."""
    zeros = torch._efficientzerotensor(4)
    assert not zeros.data_ptr()
    outputs = [torch.ones(4) for _ in range(world.size)]
    dist.all_gather(outputs, zeros)
    dist.all_reduce(zeros)
    ones = torch.ones(4)
    dist.broadcast(zeros if world.rank == 0 else ones, 0)
    group = dist.new_group()
    result = torch._efficientzerotensor(4) if world.rank == 0 else torch.ones(4)
    told = refusal(lambda: dist.all_reduce(result, group=group))  # type: ignore[arg-type]
    return [*(tensor.clone().tolist() for tensor in (*outputs, zeros, ones, result)), told]


def refuse_the_rest(world: World) -> dict[str, str]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world.size,))
    distributed = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(4)
    sparse = torch.eye(2).to_sparse()
    model: Any = fully_shard(torch.nn.Linear(4, 4))
    peer = 1 - world.rank
    group: Any = dist.group.WORLD
    acts: dict[str, Callable[[], Any]] = {
        "DTensor": lambda: dist.all_reduce(distributed),
        "transposed DTensor": lambda: dist.all_reduce(distributed.t()),
        "sent DTensor": lambda: dist.send(distributed, peer),
        "received DTensor": lambda: dist.recv(distributed, peer),
        "gathered DTensor": lambda: dist.all_gather([torch.ones(4, 2)] * 2, distributed),
        "asynchronous": lambda: group.allreduce(distributed, dist.AllreduceOptions()).wait(),
        "Wrapper": lambda: dist.broadcast(Wrapper(torch.ones(4)), 0),
        "freed": lambda: dist.all_reduce(freed),
        "FakeTensor": lambda: dist.all_reduce(fake),
        "mapped": lambda: torch.vmap(lambda row: dist.broadcast(row, 0))(torch.ones(2, 3)),
        "sparse": lambda: dist.broadcast(sparse, 0),
        "sharded model": lambda: data_parallel(model),
        "sharded model in DDP": lambda: DistributedDataParallel(model),
        "no address": lambda: group._inner._run(library.Call(op=library.ALL_REDUCE, width=4, count=3, root=-1)),
    }
    told = {name: refusal(act) for name, act in acts.items()}
    dist.all_reduce(total := torch.ones(1))  # nobody has entered anything
    assert total.item() == world.size
    return told


def test_a_tensor_without_memory_of_its_own(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[list[Any], list[Any], dict[str, str]]:
        dist.all_reduce(torch.ones(4))  # the next one of its type is the prepared call
        return use_functional_results(world), use_zeros(world), refuse_the_rest(world)

    for rank, (functional, zeros, told) in enumerate(run_ranks(check, 2, backend="shm")):
        values = (4.0, 3.0, 3.0, 2.0, 4.0, 4.0, 2.0 * rank)
        assert functional == [[value] * 4 for value in values]
        assert zeros[:-1] == [[value] * 4 for value in (0.0, 0.0, 0.0, 0.0 if rank else 1.0, float(rank))]
        assert ("ZeroTensor" in zeros[-1]) == (rank == 0)
        for name in ("DTensor", "transposed DTensor", "sent DTensor", "received DTensor", "gathered DTensor"):
            assert " a DTensor " in told[name], told
            assert "to_local()" in told[name]
        assert " a DTensor " in told["asynchronous"]
        assert " a Wrapper " in told["Wrapper"]
        assert "storage" in told["freed"]
        assert " a FakeTensor " in told["FakeTensor"]
        assert "no memory of its own" in told["mapped"]
        assert "sparse_coo" in told["sparse"]
        assert "fully_shard" in told["sharded model"]
        assert " a DTensor " in told["sharded model in DDP"]
        assert "all_reduce was refused: it was given no memory" in told["no address"]


def test_expanded_tensors_are_refused_before_anything_moves(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[str]:
        told, values = [], set()
        n, rank = world.size, world.rank
        for base in (torch.ones(1, 3), torch.ones(3, 1)):
            wide = base.expand(3, 3)
            told += [
                refusal(lambda wide=wide: dist.all_reduce(wide)),
                refusal(lambda wide=wide: dist.all_gather([wide] * n, torch.ones(3, 3))),
                refusal(lambda wide=wide: dist.reduce_scatter(wide, [torch.ones(3, 3)] * n)),
                refusal(lambda wide=wide: dist.recv(wide, 1 - rank)),
            ]
            # What is only read may be of any kind.
            target = torch.zeros(3, 3)
            dist.broadcast(wide if rank == 0 else target, 0)
            dist.reduce(wide if rank == 0 else target, 1)
            outputs = [torch.zeros(3, 3) for _ in range(n)]
            dist.all_gather(outputs, wide)
            for tensor in (*outputs, target, base):
                values |= {*tensor.unique().tolist()}
        return [*told, str(sorted(values))]

    first, second = run_ranks(check, 2, backend="shm")
    assert first[:-1] == second[:-1]
    assert all("expanded" in text for text in first[:-1]), first
    assert (first[-1], second[-1]) == ("[0.0, 1.0]", "[1.0, 2.0]")


def test_blocks_of_another_shape_are_refused(run_ranks: RunRanks) -> None:
    """As gloo does it: where the numbers would land is not what the shape says."""

    def check(world: World) -> list[str]:
        n = world.size
        flat, wide = torch.ones(6), torch.ones(2, 3)
        several = [torch.zeros(3, 2) for _ in range(n)]
        told = [
            refusal(lambda: dist.all_gather(several, wide)),
            refusal(lambda: dist.gather(wide, several if world.rank == 0 else None)) if world.rank == 0 else "",
            refusal(lambda: dist.reduce_scatter(wide, several)),
            refusal(lambda: dist.all_gather_single(torch.zeros(6 * n), wide)),
            refusal(lambda: dist.reduce_scatter_single(wide, torch.zeros(6 * n))),
        ]
        for whole in (torch.zeros(2 * n, 3), torch.zeros(n, 2, 3)):  # one after the other, or as a stack
            dist.all_gather_single(whole, wide)
            assert whole.unique().tolist() == [1.0]
        dist.all_gather_single(torch.zeros(n), torch.ones(()))
        dist.all_gather_single(torch.zeros(n * 6), flat)
        return told

    for rank, told in enumerate(run_ranks(check, 2, backend="shm")):
        assert all("[2, 3]" in text for text in (told if rank == 0 else [told[0], *told[2:]])), told


def test_integer_averages_do_not_wrap(run_ranks: RunRanks) -> None:
    def check(world: World) -> dict[str, list[int]]:
        results = {}
        for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
            dtype = getattr(torch, name)
            info = torch.iinfo(dtype)
            mine = [info.max - world.rank, info.min + world.rank, (100, 101, 102)[world.rank], 5]
            tensor = torch.tensor(mine, dtype=dtype)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            results[name] = [value - (info.max, info.min, 0, 0)[i] for i, value in enumerate(tensor.tolist())]
        return results

    for results in run_ranks(check, 3, backend="shm"):
        for name, values in results.items():
            assert values == [-1, 1, 101, 5], name


def test_a_timeout_of_one_call_is_that_calls_alone(run_ranks: RunRanks) -> None:
    def check(world: World) -> float:
        import time

        group: Any = dist.new_group(timeout=timedelta(seconds=30))
        options = dist.AllreduceOptions()
        options.timeout, options.asyncOp = timedelta(seconds=0.3), False
        group.allreduce([torch.ones(4)], options).wait()
        if world.rank == 1:
            time.sleep(0.6)
        dist.all_reduce(tensor := torch.ones(4), group=group)
        return tensor[0].item()

    assert run_ranks(check, 2, backend="shm") == [2.0, 2.0]
