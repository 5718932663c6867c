"""When ranks disagree, die or stop in the middle of shm collectives: who is told what, how soon, and what is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from phalanx.world import World
from tests.losing import die, outcome, survivors

RunRanks = Callable[..., list[Any]]


# ---- ranks that call different things

MISMATCHES: dict[str, tuple[Callable[[int], Any], str]] = {
    "operation": (
        lambda rank: dist.broadcast(torch.ones(10), 0) if rank == 1 else dist.all_reduce(torch.ones(12)),
        "rank 1 called broadcast(float32[10]) where rank 0 called all_reduce(float32[12]); "
        "collective #4 of group 'world'.",
    ),
    "operator": (
        lambda rank: dist.all_reduce(torch.ones(3), ReduceOp.MAX if rank == 1 else ReduceOp.SUM),
        "rank 1 called all_reduce(float32[3], max) where rank 0 called all_reduce(float32[3], sum); "
        "collective #4 of group 'world'.",
    ),
    "type": (
        lambda rank: dist.all_reduce(torch.ones(3, dtype=torch.int32 if rank == 1 else torch.float32)),
        "rank 1 called all_reduce(int32[3]) where rank 0 called all_reduce(float32[3]); "
        "collective #4 of group 'world'.",
    ),
    "size": (
        lambda rank: dist.all_reduce(torch.ones(1_000_000 + rank)),
        "rank 1 called all_reduce(float32[1000001]) where rank 0 called all_reduce(float32[1000000]); "
        "collective #4 of group 'world'.",
    ),
    "root": (
        lambda rank: dist.broadcast(torch.ones(3), rank),
        "rank 1 called broadcast(float32[3], root 1) where rank 0 called broadcast(float32[3], root 0); "
        "collective #4 of group 'world'.",
    ),
    "number": (
        lambda rank: [dist.barrier() for _ in range(1 + rank)] and dist.all_reduce(torch.ones(3)),
        "rank 1 called barrier() where rank 0 called all_reduce(float32[3]); collective #5 of group 'world'.",
    ),
    "split": (
        lambda rank: dist.all_to_all_single(torch.empty(4), torch.ones(5 - rank), [2, 2], [2, 3 - rank]),
        "rank 0 sends 3 elements to rank 1 in all_to_all, where rank 1 expects 2; collective #4 of group 'world'.",
    ),
}


@pytest.mark.beside_others
@pytest.mark.parametrize("kind", MISMATCHES)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_mismatch(kind: str, asynchronous: bool, run_ranks: RunRanks) -> None:
    act, text = MISMATCHES[kind]

    def check(world: World) -> tuple[str, str, float]:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(100_000))
        if asynchronous:  # what follows waits behind it, in the same order
            work = dist.barrier(async_op=True)
            assert work is not None
        else:
            dist.barrier()
        result = outcome(lambda: act(world.rank))
        again = outcome(lambda: dist.all_reduce(torch.ones(1)))
        assert again[:2] == result[:2], "a broken group must stay broken"
        return result

    swapped = _swap(text)
    for name, message, seconds in run_ranks(check, 2, backend="shm"):
        assert name == "CollectiveMismatch"
        assert message in (text, swapped), message
        assert seconds < 5


def _swap(text: str) -> str:
    """The same with the sides exchanged: whoever finds it first tells it."""
    body, _, where = text.partition("; ")
    one, middle, two = body.partition(" where ")
    return f"{two.replace('expects', 'called')}{middle}{one}; {where}"


# ---- ranks that die


def lose_a_rank(world: World, how: str) -> tuple[str, str, float]:
    tensor = torch.ones(300_000)
    dist.all_reduce(tensor)
    if how == "backward":
        return lose_in_backward(world)
    if world.rank == 1:
        time.sleep(0.3)  # so that the others wait already
        die()
    if how == "sync":
        return outcome(lambda: dist.all_reduce(tensor))
    if how == "small":
        return outcome(lambda: dist.all_reduce(torch.ones(1)))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if how == "async":
        return outcome(work.wait)
    return outcome(lambda: work.get_future().wait())


def lose_in_backward(world: World) -> tuple[str, str, float]:
    model = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(400, 400) for _ in range(4)]), bucket_cap_mb=1
    )
    model(torch.ones(4, 400)).sum().backward()
    loss = model(torch.ones(4, 400)).sum()
    if world.rank == 1:
        time.sleep(0.3)
        die()
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    result = outcome(loss.backward)
    assert before
    return result


@pytest.mark.parametrize("how", ["sync", "small", "async", "future", "backward"])
def test_a_killed_rank(how: str, run_ranks: RunRanks) -> None:
    # Where run_ranks runs them, DDP's modules are there already: each of the three ranks would import them.
    (results,) = run_ranks(lambda _: survivors(lose_a_rank, 3, how), 1, join_group=False)
    assert sorted(results) == [0, 2]
    for name, message, seconds in results.values():
        assert "rank 1 (pid " in message
        assert "has ended without taking part in collective #" in message
        assert seconds < 0.3 + 1.0
        assert name == ("RuntimeError" if how == "future" else "PeerLost")  # a torch Future knows no other error


# ---- ranks that stop or do not come


def test_a_stopped_rank_is_a_timeout_that_names_it(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[str, str, float]:
        group: Any = dist.new_group(timeout=timedelta(seconds=1))
        dist.barrier(group)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 lets it go on
        result = outcome(lambda: dist.all_reduce(torch.ones(10), group=group))
        if world.rank == 0:
            os.kill(world.claims[1].pid, signal.SIGCONT)
        return result

    for name, message, _ in run_ranks(check, 3, backend="shm"):
        assert name == "CollectiveTimeout"
        assert "the timeout of 1 s is over: rank " in message
        assert "waited for rank 1; collective #2 of group" in message


def test_a_rank_that_left(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[str, str, float]:
        group: Any = dist.new_group([0, 1])
        dist.barrier(group)
        if world.rank == 1:
            dist.destroy_process_group(group)
            return "", "", 0.0
        return outcome(lambda: dist.barrier(group))

    name, message, seconds = run_ranks(check, 2, backend="shm")[0]
    assert name == "PeerLost"
    assert "rank 1 has left the group and never comes to collective #2" in message
    assert seconds < 1


def test_abort_ends_a_wait_on_every_rank(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[str, str, float]:
        group: Any = dist.new_group()
        dist.barrier(group)
        assert isinstance(group, dist.ProcessGroup)
        if world.rank == 1:
            time.sleep(0.3)
            group.abort()
            return "CollectiveAborted", "rank 1 aborted", 0.0
        return outcome(lambda: dist.all_reduce(torch.ones(1), group=group))

    for name, message, seconds in run_ranks(check, 3, backend="shm"):
        assert name == "CollectiveAborted"
        assert "rank 1 aborted" in message
        assert seconds < 1


def interrupt_a_wait(world: World) -> tuple[str, str, float]:
    """Rank 0 waits in a collective and hears a signal; rank 1 comes later."""
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


def expect_an_interrupt(results: list[tuple[str, str, float]]) -> None:
    (name, _, seconds), other = results
    assert name == "KeyboardInterrupt"
    assert seconds < 0.6
    assert other[0] == "CollectiveAborted"
    assert "rank 0 aborted" in other[1]


def test_an_interrupt_ends_a_wait_at_once(run_ranks: RunRanks) -> None:
    expect_an_interrupt(run_ranks(interrupt_a_wait, 2, backend="shm"))


@pytest.mark.beside_others
def test_a_signal_handler_that_does_not_raise_disturbs_nothing(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[int, list[float]]:
        seen = []
        signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        tensor = torch.ones(200_000)
        for _ in range(30):
            if world.rank == 1:
                time.sleep(0.005)
            dist.all_reduce(tensor)
            tensor /= world.size
        signal.setitimer(signal.ITIMER_REAL, 0)
        return len(seen), tensor.unique().tolist()

    for signals, values in run_ranks(check, 2, backend="shm"):
        assert signals > 10
        assert values == [1.0]


@pytest.mark.beside_others
def test_a_forked_child_has_no_place_in_the_group(run_ranks: RunRanks) -> None:
    def check(world: World) -> int:
        pid = os.fork()
        if pid == 0:
            name, message, _ = outcome(lambda: dist.all_reduce(torch.ones(1)))
            os._exit(0 if name == "UsageError" and "forked" in message else 1)
        status = os.waitpid(pid, 0)[1]
        dist.all_reduce(torch.ones(1))
        return status

    assert run_ranks(check, 2, backend="shm") == [0, 0]


def test_a_timeout_of_one_call(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[str, str, float]:
        group: Any = dist.new_group()
        dist.barrier(group, timeout=timedelta(seconds=20))
        if world.rank == 1:
            time.sleep(0.8)
            return "", "", 0.0
        return outcome(lambda: dist.barrier(group, timeout=timedelta(seconds=0.4)))

    name, message, seconds = run_ranks(check, 2, backend="shm")[0]
    assert name == "CollectiveTimeout"
    assert "the timeout of 0.4 s is over: rank 0 waited for rank 1" in message
    assert 0.4 <= seconds < 0.8


# ---- messages


def lose_a_correspondent(world: World, how: str) -> tuple[str, str, float]:
    tensor = torch.ones(2_000_000)
    if world.rank == 1:
        if how == "last words":
            dist.send(tensor[:10], 0)
        if how == "in the middle":  # more than a socket holds, so a part of it stays here
            dist.isend(tensor, 0, tag=4)
        time.sleep(0.2)
        die()
    if how == "last words":  # what was sent before the end still arrives
        time.sleep(0.5)
        dist.recv(tensor[:10], 1)
    if how == "in the middle":
        time.sleep(0.4)  # what the socket holds has come; nobody will send the rest
        return outcome(lambda: dist.recv(tensor, 1, tag=4))
    if how == "full":
        return outcome(lambda: dist.send(tensor, 1))
    if how == "anybody":
        return outcome(lambda: dist.recv(tensor))
    return outcome(lambda: dist.recv(tensor[:20], 1, tag=4))


@pytest.mark.parametrize("how", ["waiting", "last words", "in the middle", "full", "anybody"])
def test_a_correspondent_is_killed(how: str) -> None:
    ((name, message, seconds),) = survivors(lose_a_correspondent, 2, how).values()
    assert name == "PeerLost"
    assert message.startswith("rank 1 (pid ")
    assert "has ended or left" in message
    assert seconds < 1.2


def test_a_message_that_never_comes(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[str, str, float]:
        group: Any = dist.new_group(timeout=timedelta(seconds=0.5))
        result = outcome(lambda: dist.recv(torch.ones(3), 1, group=group, tag=6)) if world.rank == 0 else ("", "", 0.0)
        dist.barrier()
        return result

    name, message, _ = run_ranks(check, 2, backend="shm")[0]
    assert name == "CollectiveTimeout"
    assert message.startswith("the timeout of 0.5 s is over: rank 1 has not sent float32[3] with tag 6 in group ")


def test_messages_end_with_their_group(run_ranks: RunRanks) -> None:
    """By abort on this rank, and by the other's leaving."""

    def check(world: World) -> tuple[str, str, float]:
        import threading

        group: Any = dist.new_group()
        dist.barrier(group)
        if world.rank == 1:
            dist.send(torch.ones(1), 0, group=group)  # known to rank 0: its leaving is seen
            dist.destroy_process_group(group)
            outcome(lambda: dist.recv(torch.ones(1), 0))  # stays until rank 0 is gone
            return "", "", 0.0
        dist.recv(torch.ones(1), 1, group=group)
        left = outcome(lambda: dist.recv(torch.ones(1), 1, group=group))
        assert left[0] == "PeerLost", left
        fresh: Any = dist.group.WORLD
        threading.Timer(0.2, fresh.abort).start()
        return outcome(lambda: dist.recv(torch.ones(1), 1))

    name, message, seconds = survivors(check, 2)[0]
    assert name == "CollectiveAborted"
    assert "the group was left while rank 1 has not sent float32[1]" in message
    assert seconds < 1


def test_an_interrupt_ends_a_receive_at_once(run_ranks: RunRanks) -> None:
    def check(world: World) -> float:
        import threading

        taken = 0.0
        if world.rank == 0:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                dist.recv(torch.ones(1), 1)
            taken = time.monotonic() - started
        dist.barrier()
        return taken

    assert run_ranks(check, 2, backend="shm")[0] < 0.5
