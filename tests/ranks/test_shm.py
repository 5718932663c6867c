"""Every collective of the shm backend, on every type, against a reference computed here and against gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.errors import UsageError
from phalanx.world import World

RunRanks = Callable[..., list[Any]]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
OTHERS = (torch.bool, torch.complex64, torch.complex128)
SIZES = (1, 7, 1000)
SEVERAL_ROUNDS = 600_001
RANKS = (1, 2, 3, 5)


def sample(rank: int, dtype: torch.dtype, size: int, salt: int = 0) -> Tensor:
    """What a rank brings: the same for whoever computes it."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_complex:
        parts = torch.randint(-8, 8, (size, 2), generator=generator).to(dtype.to_real())
        return torch.view_as_complex(parts)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    low = 0 if dtype == torch.uint8 else -8
    return torch.randint(low, 8, (size,), generator=generator).to(dtype)


def reduced(blocks: list[Tensor], op: str) -> Tensor:
    """In rank order, half precision in float32 and rounded once."""
    dtype = blocks[0].dtype
    wide = [block.float() if dtype in (torch.float16, torch.bfloat16) else block for block in blocks]
    steps: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.logical_or if dtype == torch.bool else torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.logical_and if dtype == torch.bool else torch.mul,
        "MIN": torch.logical_and if dtype == torch.bool else torch.minimum,
        "MAX": torch.logical_or if dtype == torch.bool else torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    result = wide[0]
    for block in wide[1:]:
        result = steps[op](result, block)
    if op == "AVG":
        if dtype.is_complex:  # torch multiplies them by a reciprocal, which is one rounding more
            result = torch.view_as_complex(torch.view_as_real(result) / len(blocks))
        elif dtype.is_floating_point:
            result = result / len(blocks)
        else:
            result = torch.div(result, len(blocks), rounding_mode="trunc")
    return result.to(dtype)


def operators(dtype: torch.dtype) -> Iterator[str]:
    yield "SUM"
    if dtype != torch.bool:
        yield "AVG"
    if not dtype.is_complex:
        yield from ("PRODUCT", "MIN", "MAX")
    if dtype in INTEGERS or dtype == torch.bool:
        yield from ("BAND", "BOR", "BXOR")


def equal(what: str, got: Tensor, expected: Tensor, faults: list[str]) -> None:
    if got.dtype != expected.dtype or not torch.equal(got, expected):
        faults.append(f"{what}: {got.flatten()[:4].tolist()} instead of {expected.flatten()[:4].tolist()}")


def check_reductions(world: World, dtype: torch.dtype) -> list[str]:
    faults: list[str] = []
    rank, ranks = world.rank, world.size
    for size in (*SIZES, SEVERAL_ROUNDS) if dtype in (torch.float32, torch.bfloat16, torch.int8) else SIZES:
        everyone = [sample(p, dtype, size) for p in range(ranks)]
        for name in operators(dtype):
            op = getattr(ReduceOp, name)
            what = f"{name} of {dtype}[{size}]"
            expected = reduced(everyone, name)
            for asynchronous in (False, True):
                tensor = everyone[rank].clone()
                work = dist.all_reduce(tensor, op, async_op=asynchronous)
                if work is not None:
                    work.wait()
                equal(f"all_reduce {what}", tensor, expected, faults)
            tensor = everyone[rank].clone()
            dist.reduce(tensor, ranks - 1, op)
            equal(f"reduce {what}", tensor, expected if rank == ranks - 1 else everyone[rank], faults)
            if size < SEVERAL_ROUNDS:
                sent = [sample(rank, dtype, size, salt=1 + q) for q in range(ranks)]
                mine = reduced([sample(p, dtype, size, salt=1 + rank) for p in range(ranks)], name)
                output = torch.empty_like(mine)
                dist.reduce_scatter(output, sent, op)
                equal(f"reduce_scatter {what}", output, mine, faults)
                output = torch.empty_like(mine)
                dist.reduce_scatter_single(output, torch.cat(sent), op)
                equal(f"reduce_scatter_single {what}", output, mine, faults)
    return faults


@pytest.mark.parametrize("ranks", RANKS)
def test_reductions(ranks: int, run_ranks: RunRanks) -> None:
    def check(world: World) -> list[str]:
        return [fault for dtype in (*FLOATS, *INTEGERS, *OTHERS) for fault in check_reductions(world, dtype)]

    for faults in run_ranks(check, ranks, backend="shm", timeout=120):
        assert faults == []


def check_moves(world: World, dtype: torch.dtype, size: int) -> list[str]:
    faults: list[str] = []
    rank, ranks = world.rank, world.size
    what = f"{dtype}[{size}]"
    everyone = [sample(p, dtype, size) for p in range(ranks)]
    root = (size + 1) % ranks

    tensor = everyone[rank].clone()
    dist.broadcast(tensor, root)
    equal(f"broadcast {what}", tensor, everyone[root], faults)

    outputs = [torch.empty_like(everyone[0]) for _ in range(ranks)]
    dist.all_gather(outputs, everyone[rank])
    whole = torch.empty(size * ranks, dtype=dtype)
    dist.all_gather_single(whole, everyone[rank])
    for p in range(ranks):
        equal(f"all_gather {what}", outputs[p], everyone[p], faults)
    equal(f"all_gather_single {what}", whole, torch.cat(everyone), faults)

    outputs = [torch.empty_like(everyone[0]) for _ in range(ranks)]
    dist.gather(everyone[rank], outputs if rank == root else None, root)
    for p in range(ranks) if rank == root else ():
        equal(f"gather {what}", outputs[p], everyone[p], faults)

    output = torch.empty_like(everyone[0])
    blocks = [sample(p, dtype, size, salt=5) for p in range(ranks)]
    dist.scatter(output, blocks if rank == root else None, root)
    equal(f"scatter {what}", output, blocks[rank], faults)
    return faults + check_all_to_all(world, dtype, size)


def check_all_to_all(world: World, dtype: torch.dtype, size: int) -> list[str]:
    faults: list[str] = []
    rank, ranks = world.rank, world.size
    what = f"{dtype}[{size}]"
    sent = [sample(rank, dtype, size, salt=10 + q) for q in range(ranks)]
    received = [sample(p, dtype, size, salt=10 + rank) for p in range(ranks)]

    outputs = [torch.empty_like(block) for block in received]
    dist.all_to_all(outputs, sent)
    whole = torch.empty(size * ranks, dtype=dtype)
    dist.all_to_all_single(whole, torch.cat(sent))
    for p in range(ranks):
        equal(f"all_to_all {what}", outputs[p], received[p], faults)
    equal(f"all_to_all_single {what}", whole, torch.cat(received), faults)

    def split(p: int, q: int) -> int:
        return (size * (p + 2 * q)) // (3 * ranks)  # none at all for some

    uneven = torch.cat([sent[q][: split(rank, q)] for q in range(ranks)])
    expected = torch.cat([received[p][: split(p, rank)] for p in range(ranks)])
    output = torch.empty_like(expected)
    sizes = [split(p, rank) for p in range(ranks)], [split(rank, q) for q in range(ranks)]
    dist.all_to_all_single(output, uneven, *sizes)
    equal(f"all_to_all_single, uneven, {what}", output, expected, faults)
    return faults


@pytest.mark.parametrize("ranks", RANKS)
def test_moves(ranks: int, run_ranks: RunRanks) -> None:
    def check(world: World) -> list[str]:
        faults = [f for dtype in (*FLOATS, *INTEGERS, *OTHERS) for f in check_moves(world, dtype, 1001)]
        for size in (0, 1, 2_200_003):  # the last is too large for caches
            faults += check_moves(world, torch.float32, size)
        return faults + check_moves(world, torch.float8_e4m3fn, 0)

    for faults in run_ranks(check, ranks, backend="shm", timeout=120):
        assert faults == []


# ---- against gloo


@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_to_gloo(ranks: int, run_ranks: RunRanks) -> None:
    """Bit for bit on two ranks, where there is one order only; to rounding on more."""

    def check(world: World) -> list[str]:
        gloo = dist.new_group(backend="gloo")
        faults: list[str] = []
        rtol = 3e-5
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
            for size in (5, 70_000):
                for name in ("SUM", "PRODUCT", "MIN", "MAX"):
                    ours, theirs = sample(world.rank, dtype, size), sample(world.rank, dtype, size)
                    dist.all_reduce(ours, getattr(ReduceOp, name))
                    dist.all_reduce(theirs, getattr(ReduceOp, name), group=gloo)
                    if world.size == 2:
                        equal(f"{name} of {dtype}", ours, theirs, faults)
                    elif not torch.allclose(ours.double(), theirs.double(), rtol, atol=rtol):
                        faults.append(f"{name} of {dtype} on {world.size} ranks")
        return faults

    for faults in run_ranks(check, ranks, backend="shm"):
        assert faults == []


# ---- tensors that are not plain


def test_layouts(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[str]:
        faults: list[str] = []
        n = world.size
        base = torch.arange(24.0).reshape(4, 6)
        for name, view in {
            "transposed": lambda t: t.t(),
            "strided": lambda t: t[:, ::2],
            "offset": lambda t: t.flatten()[5:17],
            "one element": lambda t: t[2, 3],
            "empty": lambda t: t[:0],
        }.items():
            own = base.clone()
            dist.all_reduce(view(own))
            expected = base.clone()
            view(expected).mul_(n)
            equal(f"all_reduce {name}", own, expected, faults)
            own = base + world.rank
            dist.broadcast(view(own), n - 1)
            expected = base + world.rank
            view(expected).copy_(view(base + n - 1))
            equal(f"broadcast {name}", own, expected, faults)
            target = torch.zeros(n, 4, 6)
            dist.all_gather([view(target[p]) for p in range(n)], view(base + world.rank))
            expected = torch.zeros(n, 4, 6)
            for p in range(n):
                view(expected[p]).copy_(view(base + p))
            equal(f"all_gather {name}", target, expected, faults)
        conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()  # torch.distributed refuses it, its groups do not
        assert dist.group.WORLD is not None
        dist.group.WORLD.allreduce([conjugate], dist.AllreduceOptions()).wait()
        equal("conjugate", conjugate.resolve_conj(), torch.tensor([1 - 2j, 3 + 1j]) * n, faults)
        channels_last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        dist.all_reduce(channels_last)
        equal("channels_last", channels_last, torch.full((2, 3, 4, 5), float(n)), faults)
        return faults

    for faults in run_ranks(check, 3, backend="shm"):
        assert faults == []


def test_blocks_that_do_not_lie_in_one_piece(run_ranks: RunRanks) -> None:
    """Each gets a stand-in, which has to live as long as the collective."""

    def check(world: World) -> list[str]:
        faults: list[str] = []
        n, rank = world.size, world.rank

        def block(p: int, q: int) -> Tensor:
            return torch.arange(40_000.0).reshape(200, 200).t()[:, ::2] + 10 * p + q

        def fresh() -> Tensor:
            return torch.zeros(100, 200).t()

        mine = [block(rank, q) for q in range(n)]
        got = fresh()
        dist.scatter(got, mine if rank == 1 else None, 1)
        equal("scatter", got, block(1, rank), faults)
        dist.reduce_scatter(got, mine)
        equal("reduce_scatter", got, sum((block(p, rank) for p in range(n)), torch.zeros(200, 100)), faults)
        outputs = [fresh() for _ in range(n)]
        dist.all_to_all(outputs, mine)
        for p in range(n):
            equal("all_to_all", outputs[p], block(p, rank), faults)
        dist.gather(mine[0], outputs if rank == 0 else None, 0)
        for p in range(n) if rank == 0 else ():
            equal("gather", outputs[p], block(p, 0), faults)
        return faults

    for faults in run_ranks(check, 3, backend="shm"):
        assert faults == []


def test_premultiplied_sum(run_ranks: RunRanks) -> None:
    def check(world: World) -> Tensor:
        tensor = torch.full((3,), float(world.rank + 1))
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))  # type: ignore[arg-type]  # the stubs lack it
        return tensor

    for tensor in run_ranks(check, 3, backend="shm"):
        assert tensor.tolist() == [3.0] * 3


def test_a_factor_is_not_remembered(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[float]:
        results = []
        for factor in (0.0, 2.0):
            tensor = torch.ones(1)
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))  # type: ignore[arg-type]
            results.append(tensor.item())
        return results

    assert run_ranks(check, 2, backend="shm") == [[0.0, 4.0]] * 2


def test_all_to_all_refuses_two_types(run_ranks: RunRanks) -> None:
    def check(world: World) -> str:
        try:
            group: Any = dist.group.WORLD
            group.alltoall([torch.empty(4)] * 2, [torch.ones(4).double()] * 2).wait()
        except UsageError as error:
            return str(error)
        return "nothing"

    text = "all_to_all got tensors of torch.float32, torch.float64; give one type."
    assert run_ranks(check, 2, backend="shm") == [text] * 2


def test_a_tensor_that_begins_within_an_element(run_ranks: RunRanks) -> None:
    """torch.frombuffer can make one; vector code must not be given its address."""

    def check(world: World) -> list[float]:
        buffer = bytearray(4 * 1000 + 1)
        odd = torch.frombuffer(buffer, dtype=torch.float32, offset=1, count=1000)
        assert odd.data_ptr() % 4
        odd.fill_(world.rank + 1.0)
        for _ in range(2):  # the second time by way of the prepared call
            dist.all_reduce(odd)
        return odd.unique().tolist()

    assert run_ranks(check, 2, backend="shm") == [[6.0]] * 2


def test_nan_is_not_lost(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[float]:
        tensor = torch.tensor([1.0, float("nan"), 2.0]) if world.rank == 1 else torch.tensor([float("nan"), 1.0, 3.0])
        least, most = tensor.clone(), tensor.clone()
        dist.all_reduce(least, ReduceOp.MIN)
        dist.all_reduce(most, ReduceOp.MAX)
        return [*least.isnan().tolist(), least[2].item(), *most.isnan().tolist(), most[2].item()]

    assert run_ranks(check, 2, backend="shm") == [[True, True, False, 2.0, True, True, False, 3.0]] * 2


# ---- the rest of torch.distributed


def test_messages_sparse_tensors_and_monitored_barrier(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[Any]:
        rank, n = world.rank, world.size
        right, left = (rank + 1) % n, (rank - 1) % n
        got = torch.empty(3)
        works = [dist.isend(torch.full((3,), float(rank)), right, tag=7), dist.irecv(got, left, tag=7)]
        for work in works:
            assert work is not None
            work.wait()
        if rank == 0:
            dist.send(torch.tensor([42]), 1)
        answer = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(answer) if rank == 1 else None
        operations = [
            dist.P2POp(dist.isend, torch.tensor([rank]), right),
            dist.P2POp(dist.irecv, answer2 := torch.zeros(1, dtype=torch.int64), left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([1.0]), (n,))
        dist.all_reduce(sparse)
        dist.monitored_barrier()
        return [got.tolist(), answer.item(), source, answer2.item(), sparse.to_dense().tolist()]

    results = run_ranks(check, 3, backend="shm")
    assert [result[0] for result in results] == [[2.0] * 3, [0.0] * 3, [1.0] * 3]
    assert results[1][1:3] == [42, 0]
    assert [result[3] for result in results] == [2, 0, 1]
    assert all(result[4] == [1.0] * 3 for result in results)


def test_objects_and_coalesced_forms(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[Any]:
        rank, n = world.rank, world.size
        gathered: list[Any] = [None] * n
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
        sent = [("from", rank)] if rank == 0 else [None]
        dist.broadcast_object_list(sent, 0)
        collected: list[Any] = [None] * n
        dist.gather_object(rank, collected if rank == 1 else None, 1)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {p}" for p in range(n)] if rank == 0 else None, 0)
        tensors = [torch.full((size,), float(rank)) for size in (1, 5, 50_000)]
        with dist.distributed_c10d._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        # Torch before 2.13 has the older name, which the newer ones warn about.
        all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        parts = [torch.full((2,), float(rank + 10 * i)) for i in range(3)]
        wholes = [torch.empty(2 * n) for _ in range(3)]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for whole, part in zip(wholes, parts, strict=True):
                all_gather(whole, part)
        manager.wait()
        per_rank = [[torch.empty(2), torch.empty(3)] for _ in range(n)]
        dist.all_gather_coalesced(per_rank, [torch.full((2,), float(rank)), torch.full((3,), -float(rank))])
        return [
            *(gathered, sent, collected, mine),
            [tensor.unique().tolist() for tensor in tensors],
            [whole.tolist() for whole in wholes],
            [[tensor.tolist() for tensor in each] for each in per_rank],
        ]

    for rank, result in enumerate(run_ranks(check, 2, backend="shm")):
        assert result[0] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]
        assert result[1] == [("from", 0)]
        assert result[2] == ([0, 1] if rank == 1 else [None, None])
        assert result[3] == [f"for {rank}"]
        assert result[4] == [[1.0]] * 3
        assert result[5] == [[10.0 * i] * 2 + [10.0 * i + 1] * 2 for i in range(3)]
        assert result[6] == [[[0.0] * 2, [0.0] * 3], [[1.0] * 2, [-1.0] * 3]]


def test_subgroups(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[float]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 2, 3])]
        results = []
        for ranks, group in zip(([0, 2], [1, 2, 3]), groups, strict=True):
            if world.rank in ranks:
                tensor = torch.tensor([float(world.rank)])
                dist.all_reduce(tensor, group=group)
                results.append(tensor.item())
        dist.destroy_process_group(groups[1])  # type: ignore[arg-type]  # torch takes what it gave
        again = dist.new_group([0, 1])
        if world.rank < 2:
            tensor = torch.tensor([1.0])
            dist.all_reduce(tensor, group=again)
            results.append(tensor.item())
        return results

    assert run_ranks(check, 4, backend="shm") == [[2.0, 2.0], [6.0, 2.0], [2.0, 6.0], [6.0]]


def test_monitored_barrier_names_who_did_not_come(run_ranks: RunRanks) -> None:
    def check(world: World) -> str:
        dist.monitored_barrier()
        if world.rank == 1:
            return ""
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=0.5))
        except dist.DistBackendError as error:
            return str(error)
        return "nothing"

    first, _, other = run_ranks(check, 3, backend="shm")
    assert first == "Rank 1 failed to pass monitoredBarrier in 500 ms."
    assert other.startswith("Rank 2 successfully reached monitoredBarrier, but received errors while waiting")


def test_groups_can_be_called_directly(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[float]:
        group: Any = dist.group.WORLD
        one, two = torch.ones(1), torch.full((1,), float(world.rank))
        group.allreduce(one).wait()
        group.allreduce([two], ReduceOp.MAX).wait()
        group.barrier().wait()
        return [one.item(), two.item()]

    assert run_ranks(check, 3, backend="shm") == [[3.0, 2.0]] * 3


def test_synchronous_calls_come_after_asynchronous_ones(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[float]:
        counter = torch.ones(1)
        works = []
        for _ in range(200):
            works.append(dist.all_reduce(counter, async_op=True))
            dist.all_reduce(counter, ReduceOp.MAX)
            counter.div_(world.size)
        for work in works:
            assert work is not None
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()
        return counter.tolist()

    assert run_ranks(check, 3, backend="shm") == [[1.0]] * 3
