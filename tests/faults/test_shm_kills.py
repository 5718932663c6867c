"""SIGKILL and SIGSTOP at random moments of shm collectives, set-up included: no hang, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx import errors
from phalanx.shm import ShmGroup

RANKS = 3
KILLS = int(os.environ.get("MOMENTS", "16"))
"""Moments, one after the other; `make stress` takes 200."""
STOPS = KILLS // 4


def segments() -> list[str]:
    """Shared memory of this process's group of processes: by name, or without one but open in some of them."""
    found = [name for name in os.listdir("/dev/shm") if "phalanx" in name]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.getpgid(int(process.name)) == os.getpgid(0):
                targets = [os.readlink(fd) for fd in process.glob("fd/*")]
                found += [f"{process} {target}" for target in targets if "phalanx-shm" in target]
    return found


def live(rank: int, directory: str, timeout: float) -> int:
    """Collectives of all sizes until something goes wrong. Returns 3 for a lost peer, 4 for a timeout."""
    torch.set_num_threads(1)  # the threads that this process's parent may have had are not there
    store = dist.FileStore(f"{directory}/store", RANKS)
    try:
        group = ShmGroup(store, rank, RANKS, timedelta(seconds=timeout), "kills", range(RANKS))
        tensors = [torch.ones(size) for size in (1, 5000, 700_000)]
        options: list[Any] = [dist.AllreduceOptions(), dist.AllreduceOptions()]
        options[0].asyncOp = False
        for step in range(10**9):
            group.allreduce([tensors[step % 3].fill_(1.0)], options[step % 2]).wait()
            assert tensors[step % 3][0] == RANKS
    except errors.PeerLost:
        return 3
    except errors.CollectiveTimeout:
        return 4
    except errors.JoinError:  # the store is a file: who dies while signing in is never known to be dead
        return 5
    return 0


def start_ranks(directory: str, timeout: float) -> list[int]:
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = live(rank, directory, timeout)
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def reap(pids: list[int], limit: float) -> dict[int, int]:
    """Exit codes by pid; those that hang are killed and have none."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit
    for pid in pids:
        watch = os.pidfd_open(pid)
        try:
            if select.select([watch], [], [], max(0.0, deadline - time.monotonic()))[0]:
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            else:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        finally:
            os.close(watch)
    return codes


def often(times: int, act: Callable[[random.Random], None]) -> None:
    seed = int(time.time())
    for number in range(times):
        try:
            act(random.Random(seed + number))
        except AssertionError as error:
            raise AssertionError(f"with seed {seed + number}: {error}") from error


def test_kill_at_a_random_moment() -> None:
    def kill(dice: random.Random) -> None:
        with tempfile.TemporaryDirectory() as directory:
            pids = start_ranks(directory, 1.0)
            time.sleep(dice.uniform(0, 0.15))  # the moment is what is drawn
            victims = dice.sample(pids, dice.choice([1, 1, 2]))
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            codes = reap(pids, 10)
        assert len(codes) == RANKS, "a rank hung"
        survivors = [codes[pid] for pid in pids if pid not in victims]
        assert all(code in (3, 5) for code in survivors), f"survivors ended with {survivors}"

    often(KILLS, kill)
    assert not segments()


def test_stop_at_a_random_moment() -> None:
    def stop(dice: random.Random) -> None:
        with tempfile.TemporaryDirectory() as directory:
            pids = start_ranks(directory, 0.3)
            time.sleep(dice.uniform(0.05, 0.2))
            victim = dice.choice(pids)
            os.kill(victim, signal.SIGSTOP)
            others = reap([pid for pid in pids if pid != victim], 10)
            os.kill(victim, signal.SIGCONT)
            codes = {**others, **reap([victim], 10)}
        assert len(codes) == RANKS, "a rank hung"
        assert all(code in (3, 4, 5) for code in codes.values()), f"ended with {list(codes.values())}"

    often(STOPS, stop)
    assert not segments()
