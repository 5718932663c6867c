"""The shm backend across nodes. One machine pretends to be several: each rank is told on which one it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import phalanx as px
from phalanx.errors import UsageError
from phalanx.store import join
from phalanx.world import World
from tests.ranks.test_shm import check_moves, equal, operators, reduced, sample

RunRanks = Callable[..., list[Any]]
Place = tuple[int, ...]
"""The node of each rank."""

PLACES = {"2+2": (0, 0, 1, 1), "1+2+1": (0, 1, 1, 2), "mixed": (0, 1, 1, 0, 1)}
BORDER = 65_536
"""Bytes up to which the leaders of two nodes send each other everything at once."""


def join_from(number: int, place: Place, **options: Any) -> World:
    torch.set_num_threads(1)  # more threads than cores wait for each other
    join._machine = lambda: f"pretended node {place[number]}"
    return px.init("shm", **options)


def on_nodes(run_ranks: RunRanks, check: Callable[..., Any], place: Place, *args: Any) -> list[Any]:
    def run(rank: int) -> Any:
        with join_from(rank, place) as world:
            return check(world, *args)

    return run_ranks(run, len(place), join_group=False, timeout=60)


# ---- right


def close_to(what: str, got: Tensor, expected: Tensor, faults: list[str]) -> None:
    """Nodes are added up for themselves first, so that floating-point sums may be rounded differently."""
    if not got.is_floating_point() and not got.is_complex():
        equal(what, got, expected, faults)
        return
    worst = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12, torch.complex128: 1e-12}
    tolerance = worst.get(got.dtype, 1e-5)
    wide = torch.complex128 if got.is_complex() else torch.float64
    if got.dtype != expected.dtype or not torch.allclose(got.to(wide), expected.to(wide), tolerance, tolerance):
        faults.append(f"{what}: {got.flatten()[:4].tolist()} instead of {expected.flatten()[:4].tolist()}")


def fingerprint(tensor: Tensor) -> int:
    return hash(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def check_reductions(world: World, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[list[str], list[int]]:
    faults: list[str] = []
    prints: list[int] = []
    rank, ranks = world.rank, world.size
    for size in sizes:
        everyone = [sample(p, dtype, size) for p in range(ranks)]
        for name in operators(dtype):
            if size > 10_000 and name in ("PRODUCT", "MIN", "BAND", "BOR"):
                continue  # they go the same way as others
            op, what = getattr(ReduceOp, name), f"{name} of {dtype}[{size}]"
            expected = reduced(everyone, name)
            for asynchronous in (False, True)[: 2 if name == "SUM" else 1]:
                tensor = everyone[rank].clone()
                work = dist.all_reduce(tensor, op, async_op=asynchronous)
                if work is not None:
                    work.wait()
                close_to(f"all_reduce {what}", tensor, expected, faults)
                prints.append(fingerprint(torch.view_as_real(tensor) if tensor.is_complex() else tensor))
            root = size % ranks
            tensor = everyone[rank].clone()
            dist.reduce(tensor, root, op)
            close_to(f"reduce {what}", tensor, expected if rank == root else everyone[rank], faults)
            if size < 2000 and name in ("SUM", "AVG", "MAX"):
                blocks = [[sample(p, dtype, size, salt=1 + q) for q in range(ranks)] for p in range(ranks)]
                mine = reduced([blocks[p][rank] for p in range(ranks)], name)
                output = torch.empty_like(mine)
                dist.reduce_scatter(output, blocks[rank], op)
                close_to(f"reduce_scatter {what}", output, mine, faults)
                output = torch.empty_like(mine)
                dist.reduce_scatter_single(output, torch.cat(blocks[rank]), op)
                close_to(f"reduce_scatter_single {what}", output, mine, faults)
    return faults, prints


FEW = (torch.float32, torch.bfloat16, torch.bool)
MANY = (*FEW, torch.int16, torch.float16, torch.int64, torch.complex64)


@pytest.mark.parametrize("place", PLACES)
def test_reductions_and_moves(place: str, run_ranks: RunRanks) -> None:
    """Smaller and larger than what leaders send at once; nodes of one size, of two, and ranks in no order."""

    def check(world: World) -> tuple[list[str], list[int]]:
        faults, prints = [], []
        for dtype in MANY if place == "2+2" else FEW:
            border = BORDER // dtype.itemsize
            sizes = (0, 1, border, border + 1, 300_007) if dtype == torch.float32 else (7, border + 3)
            some = check_reductions(world, dtype, sizes)
            faults += some[0]
            prints += some[1]
        for size in (0, 1001, BORDER // 4 + 1, 300_007):
            faults += check_moves(world, torch.float32, size)
        for dtype in (torch.bool, torch.complex64, torch.float16) if place == "2+2" else (torch.bool,):
            faults += check_moves(world, dtype, 77)
        return faults + check_moves(world, torch.float8_e4m3fn, 0), prints

    results = on_nodes(run_ranks, check, PLACES[place])
    for faults, prints in results:
        assert faults == []
        assert prints == results[0][1], "all ranks have the same bits"


# ---- the rest, in one start of four ranks on two nodes


def check_several_pieces(world: World) -> list[str]:
    """More than are on the network at a time, and an odd rest."""
    faults: list[str] = []
    size = 4_400_001
    everyone = [torch.arange(size, dtype=torch.float32).remainder_(1000 + p) for p in range(world.size)]
    tensor = everyone[world.rank].clone()
    dist.all_reduce(tensor)
    equal("all_reduce", tensor, everyone[0] + everyone[1] + everyone[2] + everyone[3], faults)
    dist.broadcast(tensor, 3)
    equal("broadcast", tensor, everyone[0] + everyone[1] + everyone[2] + everyone[3], faults)
    tensor = everyone[world.rank].clone()
    dist.broadcast(tensor, 2)
    equal("broadcast", tensor, everyone[2], faults)
    return faults


def check_layouts_types_and_factors(world: World) -> list[str]:
    faults: list[str] = []
    n, base = world.size, torch.arange(48_000.0).reshape(200, 240)
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda t: t.t(),
        "strided": lambda t: t[:, ::2],
        "one element": lambda t: t[2, 3],
        "empty": lambda t: t[:0],
    }
    for name, view in views.items():
        own, expected = base.clone(), base.clone()
        dist.all_reduce(view(own))
        view(expected).mul_(n)
        equal(f"all_reduce {name}", own, expected, faults)
        own, expected = base + world.rank, base + world.rank
        dist.broadcast(view(own), n - 1)
        view(expected).copy_(view(base + n - 1))
        equal(f"broadcast {name}", own, expected, faults)
        target, expected = torch.zeros(n, 200, 240), torch.zeros(n, 200, 240)
        dist.all_gather([view(target[p]) for p in range(n)], view(base + world.rank))
        for p in range(n):
            view(expected[p]).copy_(view(base + p))
        equal(f"all_gather {name}", target, expected, faults)
    for size in (3, 50_000):
        tensor = torch.full((size,), float(world.rank + 1))
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))  # type: ignore[arg-type]  # the stubs lack it
        equal("premul_sum", tensor, torch.full((size,), 5.0), faults)
        least = torch.full((size,), float("nan") if world.rank == 1 else 1.0)
        dist.all_reduce(least, ReduceOp.MIN)
        if not least.isnan().all():
            faults.append("MIN has lost a NaN")
        average = torch.full((size,), 60_000.0).half()
        dist.all_reduce(average, ReduceOp.AVG)
        equal("an average whose sum is too large", average, torch.full((size,), 60_000.0).half(), faults)
        for dtype in (torch.uint8, torch.int8, torch.uint16, torch.int32):
            tensor = torch.full((size,), torch.iinfo(dtype).max, dtype=dtype)
            dist.all_reduce(tensor, ReduceOp.AVG)
            equal(f"average of {dtype}", tensor.long(), torch.full((size,), torch.iinfo(dtype).max), faults)
        for dtype in (torch.uint16, torch.uint32, torch.uint64):
            for op, value in ((ReduceOp.SUM, 10), (ReduceOp.MAX, 4), (ReduceOp.AVG, 2)):
                tensor = torch.full((size,), world.rank + 1).to(dtype)
                dist.all_reduce(tensor, op)
                equal(f"{op} of {dtype}", tensor.long(), torch.full((size,), value), faults)
    parameter = torch.nn.Parameter(torch.full((50_000,), float(world.rank)))
    dist.broadcast(parameter, 2)
    equal("parameter", parameter.detach(), torch.full((50_000,), 2.0), faults)
    return faults


EXPANDED: tuple[Callable[[Tensor], Any], ...] = (
    dist.all_reduce,
    lambda tensor: dist.reduce(tensor, dist.get_rank()),
    lambda tensor: dist.broadcast(tensor, (dist.get_rank() + 1) % 4),
    lambda tensor: dist.all_gather([tensor] * 4, torch.ones(3)),
    lambda tensor: dist.all_gather_single(torch.ones(4, 1).expand(4, 3), torch.ones(3)),
    lambda tensor: dist.reduce_scatter(tensor, [torch.ones(3)] * 4),
)
"""What would write to it; to none of them does anybody come."""


def check_that_a_wrong_call_breaks_nothing(world: World) -> list[str]:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for wrong in (
        lambda: dist.all_gather([torch.empty(2)], torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(2).bool(), ReduceOp.AVG),
        *(lambda act=act: act(torch.ones(1).expand(3)) for act in EXPANDED),
        lambda: dist.all_gather([torch.empty(2, 3)] * 4, torch.ones(3, 2)),
        lambda: dist.all_reduce(freed),
        lambda: dist.send(freed, (world.rank + 1) % 4),
    ):
        with pytest.raises(UsageError):
            wrong()
    faults: list[str] = []
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    equal("all_reduce after wrong calls", tensor, torch.full((1,), float(world.size)), faults)
    return faults


def check_subgroups(world: World) -> list[str]:
    """Across nodes, within one, and one of each in every order."""
    faults: list[str] = []
    members = ([0, 2], [2, 3], [1, 2, 3], [3, 0, 1])
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group in zip(members, groups, strict=True):
        for size in (1, 100_000):
            tensor = torch.full((size,), float(world.rank))
            if world.rank in ranks:
                dist.all_reduce(tensor, group=group)
                equal(f"all_reduce in {ranks}", tensor, torch.full((size,), float(sum(ranks))), faults)
    dist.destroy_process_group(groups[2])  # type: ignore[arg-type]  # torch takes what it gave
    dist.barrier()
    return faults


def check_ddp(world: World) -> list[str]:
    """Over buckets of several sizes, against gloo."""
    gradients = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        torch.manual_seed(world.rank)  # DDP gives all ranks the weights of the first
        layers = [torch.nn.Linear(300, 300) for _ in range(3)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=1)
        torch.manual_seed(world.rank)
        for _ in range(2):
            model(torch.randn(4, 300)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    difference = ((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()).item()
    return [] if difference < 1e-5 else [f"gradients of shm and gloo differ by {difference:g}"]


def check_messages(world: World) -> list[str]:
    faults: list[str] = []
    rank, n = world.rank, world.size
    right, left = (rank + 1) % n, (rank - 1) % n
    got = torch.empty(3, 2).t()
    works = [dist.isend(torch.full((2, 3), float(rank)), right, tag=7), dist.irecv(got, left, tag=7)]
    for work in works:
        assert work is not None
        work.wait()
    equal("irecv", got, torch.full((2, 3), float(left)), faults)
    if rank == 0:
        dist.send(torch.tensor([42]), 2)
    if rank == 2:
        answer = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(answer)
        equal("recv from anybody", torch.tensor([source, int(answer)]), torch.tensor([0, 42]), faults)
    return faults


def check_objects_sparse_tensors_and_monitored_barrier(world: World) -> list[str]:
    rank, n = world.rank, world.size
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([1.0]), (n,))
    dist.all_reduce(sparse)
    dist.monitored_barrier()
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    sent = [("from", rank)] if rank == 1 else [None]
    dist.broadcast_object_list(sent, 1)
    collected: list[Any] = [None] * n
    dist.gather_object(rank, collected if rank == 1 else None, 1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {p}" for p in range(n)] if rank == 0 else None, 0)
    found = {
        "sparse": (sparse.to_dense().tolist(), [1.0] * n),
        "all_gather_object": (gathered, [{"rank": p, "text": "x" * p} for p in range(n)]),
        "broadcast_object_list": (sent, [("from", 1)]),
        "gather_object": (collected, list(range(n)) if rank == 1 else [None] * n),
        "scatter_object_list": (mine, [f"for {rank}"]),
    }
    return [f"{what}: {got} instead of {expected}" for what, (got, expected) in found.items() if got != expected]


CHECKS = (
    *(check_several_pieces, check_layouts_types_and_factors, check_that_a_wrong_call_breaks_nothing),
    *(check_subgroups, check_ddp, check_messages, check_objects_sparse_tensors_and_monitored_barrier),
)


def test_everything_else(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[str]:
        return [fault for each in CHECKS for fault in each(world)]

    assert on_nodes(run_ranks, check, (0, 0, 1, 1)) == [[]] * 4
