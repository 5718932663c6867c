"""send and recv between ranks of shm: any order, any tag, from anybody, and what is not in one piece."""

from __future__ import annotations

import asyncio
import random
import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import CollectiveError
from phalanx.world import World

RunRanks = Callable[..., list[Any]]


def wait_for_all(works: list[Any]) -> None:
    for work in works:
        work.wait()


def test_receives_may_be_asked_for_long_before_anybody_sends(run_ranks: RunRanks) -> None:
    """Each rank asks for all messages first, then sends in an order in which nobody would wait for the others."""

    def check(world: World) -> list[list[float]]:
        others = [rank for rank in range(world.size) if rank != world.rank]
        got = {source: torch.empty(100_000) for source in others}
        works = [dist.irecv(got[source], source) for source in others]
        for target in reversed(others):
            dist.send(torch.full((100_000,), 10.0 * world.rank + target), target)
        wait_for_all(works)
        return [got[source].unique().tolist() for source in others]

    assert run_ranks(check, 3, backend="shm") == [[[10.0], [20.0]], [[1.0], [21.0]], [[2.0], [12.0]]]


def test_the_event_loop_is_made_where_no_signal_is_heard(run_ranks: RunRanks) -> None:
    """A Ctrl-C while it is half made would leave a complaint of asyncio behind."""

    def check(world: World) -> list[bool]:
        makers = []
        plain = asyncio.new_event_loop

        def make() -> asyncio.AbstractEventLoop:
            makers.append(threading.current_thread() is threading.main_thread())
            return plain()

        asyncio.new_event_loop = make
        (dist.send if world.rank == 0 else dist.recv)(torch.ones(1), 1 - world.rank)
        return makers

    assert run_ranks(check, 2, backend="shm") == [[False], [False]]


def test_tags_are_sorted_out(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[float]:
        # More than a socket holds, so that those who come first have to be put aside.
        tensors = [torch.full((200_000,), float(tag)) for tag in range(5)]
        if world.rank == 0:
            wait_for_all([dist.isend(tensor, 1, tag=tag) for tag, tensor in enumerate(tensors)])
            return []
        got = [torch.empty(200_000) for _ in range(5)]
        for tag in (3, 0, 4, 2, 1):
            dist.recv(got[tag], 0, tag=tag)
        return [tensor.mean().item() for tensor in got]

    assert run_ranks(check, 2, backend="shm")[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_random_traffic(run_ranks: RunRanks) -> None:
    """Many messages both ways, waited for in a random order: of each sender and tag they come in the order sent."""

    def check(world: World) -> int:
        plan = random.Random(7)
        sizes = [plan.choice([0, 1, 5, 3_000, 100_000]) for _ in range(60)]
        tags = [plan.randrange(3) for _ in range(60)]
        other = 1 - world.rank
        works: list[Any] = []
        got = []
        for number, (size, tag) in enumerate(zip(sizes, tags, strict=True)):
            works.append(dist.isend(torch.full((size,), number + 100 * world.rank), other, tag=tag))
            got.append(torch.empty(size, dtype=torch.int64))
            works.append(dist.irecv(got[-1], other, tag=tag))
        random.Random(world.rank).shuffle(works)
        wait_for_all(works)
        return sum(bool((tensor == number + 100 * other).all()) for number, tensor in enumerate(got))

    assert run_ranks(check, 2, backend="shm") == [60, 60]


def test_a_receive_from_anybody_does_not_wait_for_everybody(run_ranks: RunRanks) -> None:
    def check(world: World) -> Any:
        if world.rank == 2:  # never sends anything
            dist.barrier()
            return None
        if world.rank == 1:
            dist.send(torch.tensor([5]), 0, tag=9)
            dist.barrier()
            return None
        tensor = torch.tensor([0])
        source = dist.recv(tensor, tag=9)
        dist.barrier()
        return source, tensor.item()

    assert run_ranks(check, 3, backend="shm")[0] == (1, 5)


def test_tensors_of_any_layout_and_type(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[Any]:
        made: list[Callable[[], torch.Tensor]] = [
            lambda: torch.arange(12.0).view(3, 4).t(),
            lambda: torch.arange(10.0)[::3],
            lambda: torch.tensor(4.0),
            lambda: torch.tensor([1 + 2j, 3 - 4j]),
            lambda: torch.tensor([True, False]),
            lambda: torch.arange(4.0).to(torch.bfloat16),
        ]
        if world.rank == 0:
            for make in made:
                dist.send(make(), 1)
            return []
        got = []
        for make in made:
            tensor = torch.zeros_like(make())
            dist.recv(tensor, 0)
            got.append(torch.equal(tensor, make()))
        return got

    assert run_ranks(check, 2, backend="shm")[1] == [True] * 6


def test_a_subgroup_has_messages_of_its_own(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[float]:
        group: Any = dist.new_group([2, 0])
        if world.rank == 1:
            return []
        other = 2 - world.rank
        inside, outside = torch.zeros(1), torch.zeros(1)
        works = [dist.irecv(outside, other), dist.irecv(inside, other, group=group)]
        dist.send(torch.tensor([1.0]), other, group=group)
        dist.send(torch.tensor([2.0]), other)
        wait_for_all(works)
        return [inside.item(), outside.item()]

    assert run_ranks(check, 3, backend="shm") == [[1.0, 2.0], [], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("size", "dtype", "text"),
    [
        (4, torch.float32, "rank 0 sent float32[3] where float32[4] is to be received"),
        (3, torch.int32, "rank 0 sent float32[3] where int32[3] is to be received"),
    ],
    ids=["size", "type"],
)
def test_a_message_that_does_not_fit(size: int, dtype: torch.dtype, text: str, run_ranks: RunRanks) -> None:
    def check(world: World) -> str:
        if world.rank == 0:
            dist.send(torch.ones(3), 1, tag=2)
            dist.send(torch.ones(1), 1)
            return ""
        try:
            dist.recv(torch.ones(size, dtype=dtype), 0, tag=2)
        except RuntimeError as error:
            dist.recv(torch.ones(1), 0)  # what follows is not harmed
            return f"{type(error).__name__}: {error}"
        return "nothing"

    told = run_ranks(check, 2, backend="shm")[1]
    assert told == f"CollectiveMismatch: {text}; tag 2 of group 'world'."


def test_an_error_of_this_process_is_no_lost_peer(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[str, float]:
        tensor = torch.zeros(3)
        if world.rank == 1:
            dist.send(tensor + 1, 0)
            dist.recv(tensor, 0)
            return "", tensor[0].item()
        dist.recv(tensor, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(CollectiveError) as caught:
                dist.send(tensor, 1)  # needs a connection
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        dist.send(tensor, 1)
        return str(caught.value), tensor[0].item()

    (told, _), (_, received) = run_ranks(check, 2, backend="shm")
    assert told == "rank 1 has not received float32[3] with tag 0 in group 'world': Too many open files."
    assert received == 1.0
