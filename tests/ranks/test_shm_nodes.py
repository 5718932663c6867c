"""The shm backend across nodes. One machine pretends to be several: each rank is told on which one it is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import phalanx as px
from phalanx import join
from phalanx.errors import UsageError
from phalanx.world import World
from tests.faults.test_shm_faults import MISMATCHES, _swap
from tests.losing import die, outcome, survivors
from tests.ranks.test_shm import check_moves, equal, operators, reduced, sample

RunRanks = Callable[..., list[Any]]
Place = tuple[int, ...]
"""The node of each rank."""

PLACES = {"2+2": (0, 0, 1, 1), "3+1": (0, 0, 0, 1), "1+1": (0, 1), "1+2+1": (0, 1, 1, 2), "mixed": (0, 1, 1, 0, 1)}
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
MANY = (*FEW, torch.int16, torch.float64, torch.float16, torch.int64, torch.uint8, torch.complex64)


@pytest.mark.parametrize("place", PLACES)
def test_reductions(place: str, run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[list[str], list[int]]:
        faults, prints = [], []
        for dtype in MANY if place == "2+2" else FEW:
            border = BORDER // dtype.itemsize
            sizes = (0, 1, border, border + 1, 300_007) if dtype == torch.float32 else (7, border + 3)
            some = check_reductions(world, dtype, sizes)
            faults += some[0]
            prints += some[1]
        return faults, prints

    results = on_nodes(run_ranks, check, PLACES[place])
    for faults, prints in results:
        assert faults == []
        assert prints == results[0][1], "all ranks have the same bits"


def test_several_pieces(run_ranks: RunRanks) -> None:
    """More than are on the network at a time, and an odd rest."""

    def check(world: World) -> list[str]:
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

    for faults in on_nodes(run_ranks, check, (0, 0, 1, 1)):
        assert faults == []


@pytest.mark.parametrize("place", ["2+2", "3+1", "1+2+1", "mixed"])
def test_moves(place: str, run_ranks: RunRanks) -> None:
    def check(world: World) -> list[str]:
        faults = [f for dtype in (torch.float32, torch.bool) for f in check_moves(world, dtype, 1001)]
        for size in (0, 1, BORDER // 4 + 1, 300_007):
            faults += check_moves(world, torch.float32, size)
        if place == "2+2":
            for dtype in (torch.complex64, torch.float16, torch.int64, torch.uint8):
                faults += check_moves(world, dtype, 77)
        return faults + check_moves(world, torch.float8_e4m3fn, 0)

    for faults in on_nodes(run_ranks, check, PLACES[place]):
        assert faults == []


def test_layouts_types_and_factors(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[str]:
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
            for dtype in (torch.uint16, torch.uint32, torch.uint64):
                for op, value in ((ReduceOp.SUM, 10), (ReduceOp.MAX, 4), (ReduceOp.AVG, 2)):
                    tensor = torch.full((size,), world.rank + 1).to(dtype)
                    dist.all_reduce(tensor, op)
                    equal(f"{op} of {dtype}", tensor.long(), torch.full((size,), value), faults)
        parameter = torch.nn.Parameter(torch.full((50_000,), float(world.rank)))
        dist.broadcast(parameter, 2)
        equal("parameter", parameter.detach(), torch.full((50_000,), 2.0), faults)
        return faults

    for faults in on_nodes(run_ranks, check, (0, 0, 1, 1)):
        assert faults == []


def test_a_wrong_call_breaks_nothing(run_ranks: RunRanks) -> None:
    def check(world: World) -> float:
        for wrong in (
            lambda: dist.all_gather([torch.empty(2)], torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(2).bool(), ReduceOp.AVG),
        ):
            with pytest.raises((UsageError, RuntimeError, ValueError)):
                wrong()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    assert on_nodes(run_ranks, check, (0, 1)) == [2.0, 2.0]


# ---- the rest of torch.distributed


def test_messages_sparse_tensors_objects_and_monitored_barrier(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[Any]:
        rank, n = world.rank, world.size
        right, left = (rank + 1) % n, (rank - 1) % n
        got = torch.empty(3, 2).t()
        works = [dist.isend(torch.full((2, 3), float(rank)), right, tag=7), dist.irecv(got, left, tag=7)]
        for work in works:
            assert work is not None
            work.wait()
        if rank == 0:
            dist.send(torch.tensor([42]), 2)
        answer = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(answer) if rank == 2 else None
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
        whole = sparse.to_dense().tolist()
        return [got.unique().tolist(), answer.item(), source, whole, gathered, sent, collected, mine]

    results = on_nodes(run_ranks, check, (0, 0, 1))
    for rank, result in enumerate(results):
        assert result[0] == [float((rank - 1) % 3)]
        assert result[3] == [1.0] * 3
        assert result[4] == [{"rank": p, "text": "x" * p} for p in range(3)]
        assert result[5] == [("from", 1)]
        assert result[6] == ([0, 1, 2] if rank == 1 else [None] * 3)
        assert result[7] == [f"for {rank}"]
    assert results[2][1:3] == [42, 0]


def test_subgroups(run_ranks: RunRanks) -> None:
    """Across nodes, within one, and one of each in every order."""
    members = ([0, 2], [2, 3], [1, 2, 3], [3, 0, 1])

    def check(world: World) -> list[list[float]]:
        results = []
        groups = [dist.new_group(ranks) for ranks in members]
        for ranks, group in zip(members, groups, strict=True):
            if world.rank in ranks:
                small, large = torch.tensor([float(world.rank)]), torch.full((100_000,), float(world.rank))
                for tensor in (small, large):
                    dist.all_reduce(tensor, group=group)
                results.append([small.item(), *large.unique().tolist()])
        dist.destroy_process_group(groups[2])  # type: ignore[arg-type]  # torch takes what it gave
        dist.barrier()
        return results

    results = on_nodes(run_ranks, check, (0, 0, 1, 1))
    sums = [[float(sum(ranks))] * 2 for ranks in members]
    for rank, result in enumerate(results):
        assert result == [total for total, ranks in zip(sums, members, strict=True) if rank in ranks]


def test_ddp_equals_gloo(run_ranks: RunRanks) -> None:
    def check(world: World) -> float:
        gradients = []
        for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
            torch.manual_seed(world.rank)  # DDP gives all ranks the weights of the first
            layers = [torch.nn.Linear(300, 300) for _ in range(3)]
            model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=1)
            torch.manual_seed(world.rank)
            for _ in range(2):
                model(torch.randn(4, 300)).square().sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        return ((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()).item()

    for difference in on_nodes(run_ranks, check, (0, 0, 1)):
        assert difference < 1e-5


# ---- ranks that disagree


@pytest.mark.parametrize("kind", ["operation", "operator", "size", "split"])
def test_mismatch(kind: str, run_ranks: RunRanks) -> None:
    act, text = MISMATCHES[kind]

    def check(world: World) -> tuple[str, str, float]:
        for _ in range(3):
            dist.barrier()
        result = outcome(lambda: act(world.rank))
        again = outcome(lambda: dist.all_reduce(torch.ones(1)))
        assert again[:2] == result[:2], "a broken group must stay broken"
        return result

    results = on_nodes(run_ranks, check, (0, 1))
    for name, message, seconds in results:
        assert name == "CollectiveMismatch"
        assert message in (text, _swap(text)), message
        assert message == results[0][1]
        assert seconds < 5


@pytest.mark.parametrize("culprit", [1, 2])
def test_a_mismatch_is_known_on_every_node(culprit: int, run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[str, str, float]:
        # A rank that is still in the barrier when others have found the mismatch hears of it there.
        return outcome(lambda: (dist.barrier(), dist.all_reduce(torch.ones(100_000 + (world.rank == culprit)))))

    results = on_nodes(run_ranks, check, (0, 0, 1, 1))
    for name, message, seconds in results:
        assert name == "CollectiveMismatch"
        assert f"rank {culprit} called all_reduce(float32[100001])" in message
        assert "called all_reduce(float32[100000])" in message
        assert message.endswith("collective #2 of group 'world'.")
        assert message == results[0][1]
        assert seconds < 5


# ---- ranks that are lost


def lose(act: Callable[..., Any], place: Place, *args: Any) -> dict[int, Any]:
    """Runs ``act`` on ranks of which some die; what the others returned."""

    def join_there(rank: int, ranks: int, meeting: str) -> World:
        return join_from(rank, place, init_method=meeting, world_size=ranks, rank=rank, timeout=30)

    return survivors(act, len(place), *args, join=join_there, linger=0.5)


def lose_a_rank(world: World, victim: int, how: str) -> tuple[str, str, float]:
    small, large = torch.ones(1), torch.ones(300_000)
    dist.all_reduce(small)
    dist.all_reduce(large)
    if how == "on the rails" and world.rank == victim:
        from phalanx.shm import rails

        rails.Rail.all_reduce = lambda *_: die()  # type: ignore
    elif world.rank == victim:
        time.sleep(0.3)  # so that the others wait already
        die()
    if how == "async":
        work = dist.all_reduce(large, async_op=True)
        assert work is not None
        result = outcome(work.wait)
    elif how == "gather":
        result = outcome(
            lambda: dist.gather(large, [torch.empty(300_000) for _ in range(4)] if world.rank == 0 else [])
        )
    else:
        result = outcome(lambda: dist.all_reduce(small if how == "small" else large))
    again = outcome(dist.barrier)
    assert again[:2] == result[:2]
    assert again[2] < 0.1
    return result


KILLS = [(0, "small"), (0, "on the rails"), (1, "async"), (1, "on the rails"), (2, "small"), (2, "gather")]


@pytest.mark.parametrize(("victim", "how"), KILLS)
def test_a_killed_rank(victim: int, how: str) -> None:
    results = lose(lose_a_rank, (0, 0, 1, 1), victim, how)
    assert sorted(results) == [rank for rank in range(4) if rank != victim]
    assert len({message for _, message, _ in results.values()}) == 1
    for name, message, seconds in results.values():
        assert name == "PeerLost"
        assert message.startswith(f"rank {victim} (host ")
        assert "has ended" in message
        assert "in collective #3 of group 'world'" in message
        assert seconds < 0.3 + 2.0


@pytest.mark.parametrize("how", ["small", "on the rails"])
def test_the_only_rank_of_a_node_is_killed(how: str) -> None:
    results = lose(lose_a_rank, (0, 1, 1, 2), 3, how)
    assert sorted(results) == [0, 1, 2]
    for name, message, _ in results.values():
        assert name == "PeerLost"
        assert message.startswith("rank 3 (host ")


def test_a_rank_is_killed_while_the_group_is_formed() -> None:
    def check(world: World) -> tuple[str, str, float]:
        if world.rank == 3:
            from phalanx.shm import rails

            rails.Rail.__init__ = lambda *_: die()  # type: ignore
        group: Any = None

        def form_and_use() -> None:
            nonlocal group
            group = dist.new_group(timeout=timedelta(seconds=1.5))
            dist.barrier(group)

        return outcome(form_and_use)

    results = lose(check, (0, 0, 1, 1))
    assert sorted(results) == [0, 1, 2]
    assert results[1][0] == "JoinError"  # at the other end of its rail
    assert "gloo cannot connect ranks 1, 3" in results[1][1]
    for rank in (0, 2):
        assert results[rank][0] == "PeerLost"
    for _, _, seconds in results.values():
        assert seconds < 6


def test_a_stopped_rank_is_a_timeout_that_names_it(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[tuple[str, str, float]]:
        results = []
        for stopped in (1, 2):  # a rank beside the others, and one that is a node of its own
            group: Any = dist.new_group(timeout=timedelta(seconds=0.7))
            dist.barrier(group)
            if world.rank == stopped:
                os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 lets it go on
            results.append(outcome(lambda group=group: dist.all_reduce(torch.ones(10), group=group)))
            if world.rank == 0:
                os.kill(world.claims[stopped].pid, signal.SIGCONT)
            dist.barrier()
        return results

    for results in on_nodes(run_ranks, check, (0, 0, 1)):
        for stopped, (name, message, _) in zip((1, 2), results, strict=True):
            assert name == "CollectiveTimeout"
            assert "the timeout of 0.7 s is over: rank 0 waited for rank" in message
            assert f"waited for rank {stopped}; collective #2 of group" in message


def test_a_rank_that_left_and_one_that_aborts(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[tuple[str, str, float]]:
        results = []
        for leaver in range(3):
            group: Any = dist.new_group()
            dist.barrier(group)
            if world.rank == leaver:
                dist.destroy_process_group(group)
            else:
                results.append(outcome(lambda group=group: dist.barrier(group)))
            dist.barrier()
        for aborter in range(3):
            group = dist.new_group()
            dist.barrier(group)
            if world.rank == aborter:
                time.sleep(0.2)
                group.abort()
            else:
                results.append(outcome(lambda group=group: dist.all_reduce(torch.ones(1), group=group)))
            dist.barrier()
        return results

    for rank, results in enumerate(on_nodes(run_ranks, check, (0, 0, 1))):
        for other, (name, message, seconds) in zip([r for r in range(3) if r != rank], results[:2], strict=True):
            assert name == "PeerLost"
            assert f"rank {other} has left the group and never comes to collective #2" in message
            assert seconds < 2
        for other, (name, message, seconds) in zip([r for r in range(3) if r != rank], results[2:], strict=True):
            assert name == "CollectiveAborted"
            assert f"rank {other} aborted the group" in message
            assert seconds < 2


def test_an_interrupt_ends_a_wait_at_once(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[str, str, float]:
        import threading

        group: Any = dist.new_group()
        dist.barrier(group)
        if world.rank == 0:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            started = time.monotonic()
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except KeyboardInterrupt:
                return "KeyboardInterrupt", "", time.monotonic() - started
        time.sleep(0.6)
        return outcome(lambda: dist.all_reduce(torch.ones(1), group=group))

    (name, _, seconds), other = on_nodes(run_ranks, check, (0, 1))
    assert name == "KeyboardInterrupt"
    assert seconds < 0.6
    assert other[0] == "CollectiveAborted"
    assert "rank 0 aborted" in other[1]


def test_a_forked_child_does_not_hide_an_end() -> None:
    """A child that outlives its parent has copies of its connections, and must close them."""

    def check(world: World) -> Any:
        dist.barrier()
        if world.rank == 1:
            if os.fork() == 0:
                time.sleep(1.5)
                os._exit(0)
            die()
        return outcome(dist.barrier)

    ((name, message, seconds),) = lose(check, (0, 1)).values()
    assert name == "PeerLost"
    assert message.startswith("rank 1 (host ")
    assert seconds < 1
