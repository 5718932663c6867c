"""What the C library notes in a rank's page while it runs a collective."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.status import layout, own_page, reading
from phalanx.status.reading import Collective, Status
from phalanx.world import World

RunRanks = Callable[..., list[Any]]


def recorded_group(directory: Path, world: World) -> Any:
    """A group that is made when there is a page."""
    torch.set_num_threads(1)
    own_page.begin(directory, world.rank, world.size)
    return dist.new_group(backend="shm")


def page_of(directory: Path, rank: int) -> Status:
    found = reading.read(layout.status_path(directory, rank))
    assert found is not None
    return found


def short(one: Collective) -> tuple[int, str, str, int, str]:
    return one.number, one.op, one.dtype, one.size, one.state


def one_after_the_other(world: World, directory: Path) -> list[list[Any]]:
    seen = []
    group = recorded_group(directory, world)
    dist.all_reduce(torch.ones(3, dtype=torch.float64), group=group)
    dist.broadcast(torch.ones(4), 0, group=group)
    with dist._coalescing_manager(group=group):
        dist.all_reduce(torch.ones(5), group=group)
        dist.all_reduce(torch.ones(6), group=group)
    dist.barrier(group=group)
    seen.append([short(one) for one in page_of(directory, world.rank).collectives])
    works = [dist.all_reduce(torch.ones(8 + i), group=group, async_op=True) for i in range(1 if world.rank else 40)]
    assert works[0] is not None
    works[0].wait()
    if world.rank == 0:  # the second one runs, and is as old that its place was taken
        seen.append([short(one) for one in page_of(directory, 0).collectives])
        world.store.set("seen", "yes")
    else:
        world.store.wait(["seen"])
        works += [dist.all_reduce(torch.ones(8 + i), group=group, async_op=True) for i in range(1, 40)]
    for work in works:
        assert work is not None
        work.wait()
    page = page_of(directory, world.rank)
    seen.append([short(one) for one in page.collectives])
    moments = [moment for one in page.collectives for moment in (one.started_at, one.ended_at)]
    assert moments == sorted(moments)  # type: ignore[type-var]
    assert {Path(one.place.file).name for one in page.collectives if one.place} == {Path(__file__).name}
    with contextlib.suppress(dist.DistBackendError):
        dist.all_reduce(torch.ones(3 + world.rank), group=group)  # they do not agree
    seen.append([short(one) for one in page_of(directory, world.rank).collectives[-1:]])
    return seen


def test_one_after_the_other(run_ranks: RunRanks, tmp_path: Path) -> None:
    for rank, (first, *queued, done, failed) in enumerate(run_ranks(one_after_the_other, 2, tmp_path, backend="shm")):
        assert first == [
            (1, "all_reduce", "float64", 3, "done"),
            (2, "broadcast", "float32", 4, "done"),
            (3, "all_reduce", "float32", 5, "done"),
            (4, "barrier", "", 0, "done"),
        ]
        assert queued == (
            [[(5 + i, "all_reduce", "float32", 8 + i, "queued") for i in range(8, 40)]] if rank == 0 else []
        )
        assert done == [(5 + i, "all_reduce", "float32", 8 + i, "done") for i in range(8, 40)]
        assert failed == [(45, "all_reduce", "float32", 3 + rank, "failed")]


def times(world: World, directory: Path) -> Status:
    group = recorded_group(directory, world)
    page = own_page.current()
    assert page is not None
    page.enter(layout.FORWARD)
    if world.rank == 1:
        threading.Event().wait(0.3)  # what is measured is the waiting for it
    dist.all_reduce(torch.ones(1), group=group)
    page.enter(layout.BACKWARD)
    other = threading.Thread(target=dist.barrier, args=(group,))
    other.start()
    if world.rank == 1:
        threading.Event().wait(0.3)
    other.join()
    page.enter(layout.OTHER)
    return page_of(directory, world.rank)


def test_waiting_counts_in_its_phase_if_the_loop_does_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(times, 2, tmp_path, backend="shm")
    assert 0.15 < first.blocked["forward"] < 5.0
    assert second.blocked["forward"] < 0.15
    assert first.blocked["backward"] == second.blocked["backward"] == 0.0
    assert first.waited > first.blocked["forward"] >= second.blocked["forward"] > 0.0


def interrupted(world: World, directory: Path) -> list[str]:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    group = recorded_group(directory, world)
    if world.rank == 1:
        world.store.wait(["over"])
        return []
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGALRM, before)
        world.store.set("over", "yes")
    return [one.state for one in page_of(directory, world.rank).collectives]


def test_one_that_is_interrupted_has_failed(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(interrupted, 2, tmp_path, backend="shm")[0] == ["failed"]


def read_beside(world: World, directory: Path) -> int:
    reads, stop = 0, threading.Event()
    wrong: list[Collective] = []

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            wrong.extend(one for one in page_of(directory, world.rank).collectives if one.size != one.number % 50 + 1)
            reads += 1

    group = recorded_group(directory, world)
    reader = threading.Thread(target=read)
    reader.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(1, 2001):
            dist.all_reduce(torch.ones(number % 50 + 1), group=group)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        reader.join()
    assert not wrong, wrong
    return reads


def test_whoever_reads_finds_whole_notes(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert min(run_ranks(read_beside, 2, tmp_path, backend="shm", timeout=120)) > 20
