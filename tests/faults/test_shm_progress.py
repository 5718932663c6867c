"""A timeout counts while nothing moves: a slow rank is not a missing one, wherever in a collective it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.shm.hierarchical import agreement
from phalanx.world import World
from tests.losing import outcome
from tests.ranks.test_shm_nodes import on_nodes

RunRanks = Callable[..., list[Any]]

TIMEOUT = 2.0
PAUSES = [0.7] * 3
"""Longer together than the timeout; each is far below it, for a loaded machine makes them longer."""
SHORT = 0.8
ELEMENTS = 16_000_000


def hold_up(pid: int, arriving: Tensor, pauses: list[float]) -> None:
    """Stops a process for each pause, once more of what it sends has come; the tensor holds ones until then."""
    for number, pause in enumerate(pauses):
        mark = (2 * number + 1) * len(arriving) // (2 * len(pauses) + 2)
        while arriving[mark] == 1.0:
            time.sleep(0.0005)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(pause)
        os.kill(pid, signal.SIGCONT)


def slowly(world: World, act: Callable[[Tensor], Any], pauses: list[float]) -> tuple[str, str, float]:
    """What becomes of it on each rank if the last rank is stopped as often, while rank 0 takes part."""
    tensor = torch.ones(ELEMENTS)
    dist.barrier()
    if world.rank:
        return outcome(lambda: act(tensor))
    thread = threading.Thread(target=hold_up, args=(world.claims[-1].pid, tensor, pauses))
    thread.start()
    result = outcome(lambda: act(tensor))
    if result[0] != "nothing":
        tensor.zero_()  # what did not come is not waited for
    thread.join()
    return result


def exchange(group: Any) -> Callable[[Tensor], Any]:
    """The last rank sends to the first one."""
    last = dist.get_world_size() - 1

    def act(tensor: Tensor) -> None:
        if dist.get_rank() == last:
            dist.send(tensor + 1, 0, group=group)
        elif dist.get_rank() == 0:
            dist.recv(tensor, last, group=group)

    return act


def test_a_slow_rank_is_waited_for_and_a_stopped_one_is_not(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[tuple[str, str, float]]:
        group: Any = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        acts = [lambda tensor: dist.all_reduce(tensor, group=group), exchange(group)]
        slow = [slowly(world, act, PAUSES) for act in acts]
        short: Any = dist.new_group(timeout=timedelta(seconds=SHORT))
        return [*slow, slowly(world, lambda tensor: dist.all_reduce(tensor, group=short), [1.5 * SHORT])]

    for rank, (*slow, stopped) in enumerate(run_ranks(check, 2, backend="shm")):
        for name, message, _ in slow:
            assert name == "nothing", message
        assert stopped[0] == "CollectiveTimeout", stopped
        assert "the timeout of 0.8 s is over: rank 0 waited for rank 1; collective #" in stopped[1]
        assert rank or stopped[2] >= SHORT


def test_across_nodes_what_moves_by_gloo_is_progress_too(run_ranks: RunRanks) -> None:
    def check(world: World) -> tuple[str, str, float]:
        agreement._GRACE = 0.0
        group: Any = dist.new_group(timeout=timedelta(seconds=TIMEOUT))

        def gather(tensor: Tensor) -> None:
            outputs = [torch.empty_like(tensor), tensor] if world.rank == 0 else None
            dist.gather(torch.full_like(tensor, 2.0), outputs, 0, group=group)

        return slowly(world, gather, PAUSES)

    for name, message, _ in on_nodes(run_ranks, check, (0, 1)):
        assert name == "nothing", message
