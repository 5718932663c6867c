"""When ranks of several nodes disagree, die, stop or leave: every rank of every node is told the same, and soon.

One machine pretends to be several nodes, as in tests/ranks/test_shm_nodes.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from phalanx.shm.node import failures
from phalanx.shm.node.failures import PeerLost
from phalanx.store.failure_flag import FailureFlag
from phalanx.world import World
from tests.faults.test_shm_faults import MISMATCHES, _swap, expect_an_interrupt, interrupt_a_wait
from tests.losing import die, outcome, survivors
from tests.ranks.test_shm_nodes import Place, RunRanks, join_from, on_nodes

# ---- ranks that disagree


@pytest.mark.beside_others
def test_mismatches(run_ranks: RunRanks) -> None:
    """Between two nodes of one rank; each in a world of its own, for it breaks it."""
    kinds = ("operation", "operator", "size", "split")

    def check(rank: int) -> list[tuple[str, str, float]]:
        results = []
        for kind in kinds:
            with join_from(rank, (0, 1)):
                for _ in range(3):
                    dist.barrier()
                results.append(outcome(lambda act=MISMATCHES[kind][0]: act(rank)))
                again = outcome(lambda: dist.all_reduce(torch.ones(1)))
                assert again[:2] == results[-1][:2], "a broken group must stay broken"
        return results

    for kind, *both in zip(kinds, *run_ranks(check, 2, join_group=False), strict=True):
        text = MISMATCHES[kind][1]
        for name, message, seconds in both:
            assert name == "CollectiveMismatch"
            assert message in (text, _swap(text)), message
            assert message == both[0][1]
            assert seconds < 5


@pytest.mark.beside_others
def test_a_mismatch_is_known_on_every_node(run_ranks: RunRanks) -> None:
    culprits = (1, 2)

    def check(rank: int) -> list[tuple[str, str, float]]:
        results = []
        for culprit in culprits:
            with join_from(rank, (0, 0, 1, 1)):
                size = 100_000 + (rank == culprit)
                # A rank that is still in the barrier when others have found the mismatch hears of it there.
                results.append(outcome(lambda size=size: (dist.barrier(), dist.all_reduce(torch.ones(size)))))
        return results

    for culprit, *everyone in zip(culprits, *run_ranks(check, 4, join_group=False), strict=True):
        for name, message, seconds in everyone:
            assert name == "CollectiveMismatch"
            assert f"rank {culprit} called all_reduce(float32[100001])" in message
            assert "called all_reduce(float32[100000])" in message
            assert message.endswith("collective #2 of group 'world'.")
            assert message == everyone[0][1]
            assert seconds < 5


# ---- ranks that are lost


def lose(act: Callable[..., Any], place: Place, *args: Any) -> dict[int, Any]:
    """Runs ``act`` on ranks of these nodes of which some die; what the others returned."""

    def join_there(rank: int, ranks: int, meeting: str) -> World:
        return join_from(rank, place, init_method=meeting, world_size=ranks, rank=rank, timeout=30)

    return survivors(act, len(place), *args, join=join_there, linger=0.5)


def lose_a_rank(world: World, victim: int, how: str) -> tuple[str, str, float]:
    small, large = torch.ones(1), torch.ones(300_000)
    dist.all_reduce(small)
    dist.all_reduce(large)
    if how == "across nodes" and world.rank == victim:
        from phalanx.shm.hierarchical import gloo_groups

        gloo_groups.GlooGroup.all_reduce = lambda *_: die()  # type: ignore
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


KILLS = [(0, "across nodes"), (1, "async"), (2, "small"), (3, "gather")]


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


@pytest.mark.beside_others
def test_the_only_rank_of_a_node_is_killed() -> None:
    """Nobody is left there to say who it was."""
    results = lose(lose_a_rank, (0, 1, 1, 2), 3, "across nodes")
    assert sorted(results) == [0, 1, 2]
    for name, message, _ in results.values():
        assert name == "PeerLost"
        assert message.startswith("rank 3 (host ")


def test_a_rank_is_killed_while_the_group_is_formed() -> None:
    def check(world: World) -> tuple[str, str, float]:
        if world.rank == 3:
            from phalanx.shm.hierarchical import gloo_groups

            gloo_groups.GlooGroup.__init__ = lambda *_: die()  # type: ignore
        group: Any = None

        def form_and_use() -> None:
            nonlocal group
            group = dist.new_group(timeout=timedelta(seconds=1.5))
            dist.barrier(group)

        return outcome(form_and_use)

    results = lose(check, (0, 0, 1, 1))
    assert sorted(results) == [0, 1, 2]
    assert results[1][0] == "JoinError"  # the other rank of its gloo group
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
    expect_an_interrupt(on_nodes(run_ranks, interrupt_a_wait, (0, 1)))


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


# ---- a store that does not answer


class SilentStore:
    """As one behind a cut link: the question is on its way, and no answer comes until the link is back."""

    def __init__(self) -> None:
        self.link = threading.Event()
        self.value = b""

    def check(self, keys: list[str]) -> bool:
        self.link.wait()
        return bool(self.value)

    def get(self, key: str) -> bytes:
        return self.value

    def compare_set(self, key: str, old: str, new: str) -> bytes:
        self.link.wait()
        self.value = self.value or new.encode()
        return self.value


def test_a_store_that_does_not_answer_holds_nobody_up() -> None:
    store = SilentStore()
    flag = FailureFlag(cast(Any, store), failures.by_name)
    started = time.monotonic()
    assert flag.cause() is None
    assert flag.is_silent
    assert str(flag.raise_with(PeerLost("rank 1 is gone."))) == "rank 1 is gone."
    assert time.monotonic() - started < 2
    later = FailureFlag(cast(Any, store), failures.by_name)
    assert later.cause() is None
    store.value = b'{"kind": "PeerLost", "text": "rank 2 is gone."}'
    store.link.set()
    assert str(later.cause()) == "rank 2 is gone.", "when the link is back, it is asked again"
    assert not later.is_silent
    for thread in threading.enumerate():
        if thread.name == "phalanx-failure-flag":
            thread.join(5)
