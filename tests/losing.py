"""Ranks of which some die. They have no launcher, which would end the survivors itself: those say what they saw."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import phalanx as px
from phalanx.world import World

Join = Callable[[int, int, str], World]
"""Rank, number of ranks, and where they meet."""


def outcome(act: Callable[[], Any]) -> tuple[str, str, float]:
    """The kind and text of what it raised, and the seconds it took."""
    started = time.monotonic()
    try:
        act()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def join_shm(rank: int, ranks: int, meeting: str) -> World:
    return px.init("shm", meeting, ranks, rank, timeout=30)


def survivors(
    act: Callable[..., Any], ranks: int, *args: Any, join: Join = join_shm, linger: float = 0.0
) -> dict[int, Any]:
    """Runs ``act(world, *args)`` on ranks of which some die; what the others returned.

    ``linger``: seconds for which a survivor stays, where the others are not to notice its end.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        queue = context.SimpleQueue()

        def live(rank: int) -> None:
            torch.set_num_threads(1)  # the threads that this process's parent may have had are not there
            world = join(rank, ranks, f"file://{directory}/store")
            queue.put((rank, act(world, *args)))
            time.sleep(linger)
            os._exit(0)  # the group may be broken, and leaving it in order is not what is tested

        processes = [context.Process(target=live, args=(rank,)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            if process.exitcode is None:
                process.kill()
                process.join()
                raise AssertionError("a rank hangs")
        results = {}
        while not queue.empty():
            rank, value = queue.get()
            results[rank] = value
        queue.close()
        for process in processes:
            process.close()
        return results
