"""Random programs: a random sequence of collectives on random groups gives on shm what it gives on gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.world import World

RunRanks = Callable[..., list[Any]]
PROGRAMS = int(os.environ.get("MOMENTS", "4"))
"""`make stress` takes 200."""
RANKS = 4
GROUPS = ((0, 1, 2, 3), (0, 2), (1, 2, 3))
OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("barrier", "all_gather_single", "reduce_scatter_single"),
)


@dataclass(frozen=True)
class Step:
    operation: str
    group: int
    root: int
    size: int
    dtype: torch.dtype
    reduce: str
    asynchronous: bool


STEPS = st.builds(
    Step,
    operation=st.sampled_from(OPERATIONS),
    group=st.integers(0, len(GROUPS) - 1),
    root=st.integers(0, RANKS - 1),
    size=st.one_of(st.integers(0, 40), st.integers(4000, 4200), st.integers(100_000, 200_000)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]),
    reduce=st.sampled_from(["SUM", "MIN", "MAX", "PRODUCT"]),
    asynchronous=st.booleans(),
)


def play(step: Step, group: Any, rank: int, salt: int) -> tuple[list[Tensor], Any]:  # noqa: PLR0911
    """Starts one step; what it writes, and the work if it is asynchronous."""
    members = GROUPS[step.group]
    n, root = len(members), members[step.root % len(members)]
    # Small whole numbers: every order of adding them up gives the same.
    mine = ((torch.arange(step.size) + rank + salt) % 3).to(step.dtype)
    many = [((torch.arange(step.size) + rank + 5 * q + salt) % 3).to(step.dtype) for q in range(n)]
    out = [torch.zeros_like(mine) for _ in range(n)]
    op = getattr(ReduceOp, step.reduce)
    common = {"group": group, "async_op": step.asynchronous}
    if step.operation == "all_reduce":
        return [mine], dist.all_reduce(mine, op, **common)
    if step.operation == "reduce":  # what it leaves on the others is undefined
        return [mine] if rank == root else [], dist.reduce(mine, root, op, **common)
    if step.operation == "broadcast":
        return [mine], dist.broadcast(mine, root, **common)
    if step.operation == "all_gather":
        return out, dist.all_gather(out, mine, **common)
    if step.operation == "gather":
        return out, dist.gather(mine, out if rank == root else None, root, **common)
    if step.operation == "scatter":
        return [out[0]], dist.scatter(out[0], many if rank == root else None, root, **common)
    if step.operation == "reduce_scatter":
        return [out[0]], dist.reduce_scatter(out[0], many, op, **common)
    if step.operation == "all_to_all":
        return out, dist.all_to_all(out, many, **common)
    if step.operation == "barrier":
        return [], dist.barrier(**common)
    whole, parts = torch.zeros(step.size * n, dtype=step.dtype), torch.cat(many)
    if step.operation == "all_gather_single":
        return [whole], dist.all_gather_single(whole, mine, **common)
    return [out[0]], dist.reduce_scatter_single(out[0], parts, op, **common)


def play_all(world: World, program: list[Step], backend: str) -> list[list[Tensor]]:
    groups = [dist.new_group(list(members), backend=backend) for members in GROUPS]
    written, works = [], []
    for salt, step in enumerate(program):
        if world.rank in GROUPS[step.group]:
            tensors, work = play(step, groups[step.group], world.rank, salt)
            written.append(tensors)
            works.append(work)
    for work in works:
        if work is not None:
            work.wait()
    return written


@settings(max_examples=PROGRAMS, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(STEPS, min_size=1, max_size=20))
def test_random_programs(program: list[Step], run_ranks: RunRanks) -> None:
    def compare(world: World) -> list[int]:
        ours, theirs = (play_all(world, program, backend) for backend in ("shm", "gloo"))
        pairs = zip(ours, theirs, strict=True)
        return [i for i, (a, b) in enumerate(pairs) if not all(map(torch.equal, a, b))]

    assert run_ranks(compare, RANKS, backend="shm") == [[]] * RANKS
