"""The kernel's counters of processes killed for memory, on machines made of files: both versions, and none."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.events import Ending, ErrorRecord
from phalanx.launch.process.zygote_messages import Exited
from phalanx.system import procfs
from phalanx.watchdog import oom
from phalanx.watchdog.memory import MemoryWatchdog
from phalanx.watchdog.oom import Counters, Shortage

GIB = 1 << 30


class Machine:
    """Files like the kernel's, which can be rewritten."""

    def __init__(self, directory: Path, membership: str) -> None:
        self.root, self.proc = directory / "cgroup", directory / "proc"
        self.write("proc/self/cgroup", membership)
        self.write("proc/meminfo", f"MemTotal:       {16 * GIB >> 10} kB\nMemFree: 1 kB\n")
        self.vmstat(kills=3)

    def write(self, name: str, text: str | int) -> None:
        path = self.root.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def vmstat(self, kills: int) -> None:
        self.write("proc/vmstat", f"nr_free_pages 7\noom_kill {kills}\nnuma_hit 4")

    def v2(self, group: str, limit: str | int, kills: int, shortages: int) -> None:
        self.write(f"cgroup/{group}/memory.max", limit)
        self.write(
            f"cgroup/{group}/memory.events",
            f"low 0\nhigh 0\nmax 90\noom {shortages}\noom_kill {kills}\noom_group_kill 0",
        )

    def v1(self, group: str, limit: int, kills: int, *, failcnt: int = 0, peak: int = 0) -> None:
        self.write(f"cgroup/memory/{group}/memory.limit_in_bytes", limit)
        self.write(f"cgroup/memory/{group}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}")
        self.write(f"cgroup/memory/{group}/memory.failcnt", failcnt)
        self.write(f"cgroup/memory/{group}/memory.max_usage_in_bytes", peak)

    def counters(self) -> Counters:
        return Counters(self.root, self.proc)


def test_version_2_names_the_group_whose_limit_was_reached(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/slice/job")
    machine.v2("slice/job", "max", kills=0, shortages=0)
    machine.v2("slice", 2 * GIB, kills=5, shortages=5)
    counters = machine.counters()
    before = counters.look()
    assert oom.shortage(before, counters.look()) is None
    machine.v2("slice", 2 * GIB, kills=6, shortages=6)
    assert oom.shortage(before, counters.look()) is None, "a process of another group beside ours"
    machine.v2("slice/job", "max", kills=2, shortages=0)
    assert oom.shortage(before, counters.look()) == Shortage(2, 2 * GIB, "/slice")


def test_version_2_when_the_machine_has_run_out(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/job")
    machine.v2("job", 8 * GIB, kills=1, shortages=1)
    counters = machine.counters()
    before = counters.look()
    machine.v2("job", 8 * GIB, kills=2, shortages=1)
    assert oom.shortage(before, counters.look()) == Shortage(1, 16 * GIB, "")


def test_version_2_in_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/")
    machine.v2(".", 2 * GIB, kills=0, shortages=0)
    counters = machine.counters()
    before = counters.look()
    machine.v2(".", 2 * GIB, kills=1, shortages=1)
    assert oom.shortage(before, counters.look()) == Shortage(1, 2 * GIB, "/")


@pytest.mark.parametrize("sign", [{"failcnt": 4}, {"peak": 2 * GIB}], ids=["failcnt", "peak"])
def test_version_1(sign: dict[str, int], tmp_path: Path) -> None:
    """Where memory and swap share a limit, its kernel does not count that it was reached."""
    machine = Machine(tmp_path, "4:memory:/docker/abc\n3:cpuset:/\n0::/")
    machine.v1("docker/abc", 2 * GIB, kills=0)
    machine.v1("docker", (1 << 63) - 4096, kills=0)
    counters = machine.counters()
    before = counters.look()
    machine.v1("docker/abc", 2 * GIB, kills=1, **sign)
    assert oom.shortage(before, counters.look()) == Shortage(1, 2 * GIB, "/docker/abc")


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/")
    counters = machine.counters()
    before = counters.look()
    machine.vmstat(kills=4)
    assert oom.shortage(before, counters.look()) == Shortage(1, 16 * GIB, "")


def test_what_others_lost_is_not_ours(tmp_path: Path) -> None:
    """A group that counts, and has lost nobody, is believed more than the machine's counter."""
    machine = Machine(tmp_path, "0::/job")
    machine.v2("job", 8 * GIB, kills=1, shortages=1)
    counters = machine.counters()
    before = counters.look()
    machine.vmstat(kills=9)
    assert oom.shortage(before, counters.look()) is None


LOG = (
    "6,339,5140900,-;Memory cgroup out of memory: Killed process 4242 (python) total-vm:1254168kB, anon-rss:769948kB, "
    "file-rss:18936kB, shmem-rss:4kB, UID:0 pgtables:1784kB oom_score_adj:0\n"
    "6,340,5140901,-;Out of memory: Killed process 4343 (python) total-vm:1kB, anon-rss:8kB, file-rss:0kB\n"
)


def test_the_kernels_log(tmp_path: Path) -> None:
    log, here, container = tmp_path / "kmsg", "pid:[4026531836]", "pid:[4026532001]"
    log.write_text(LOG)
    assert oom.killed_by_log([4242, 1], log, here) == {4242: (769948 + 18936 + 4) << 10}
    assert oom.killed_by_log([4343], log, here) == {4343: 8 << 10}
    assert oom.killed_by_log([4242], log, container) == {}, "its pids are not ours"
    assert oom.killed_by_log([4242], tmp_path / "forbidden", here) == {}


def test_memory_of_a_process_and_its_children() -> None:
    assert (procfs.resident(os.getpid()) or 0) > 8 << 20
    assert procfs.resident(2**22 + 1) is None
    assert procfs.children(2**22 + 1) == []
    parent, child = os.getpid(), os.fork()
    if child == 0:
        signal.pause()
    try:
        assert child in procfs.children(parent)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---- which rank it was


def member(rank: int, number: int | None, memory: int = 0, *, asked_with: int | None = None, said: str = "") -> Any:
    pid = 2**22 + 100 + rank  # of nobody
    error = ErrorRecord(rank, pid, 1.0, "RuntimeError", said, (), "", 1) if said else None
    exited = Exited(rank, pid, None if number else 1, number, memory)
    return SimpleNamespace(rank=rank, pid=pid, error=error, exited=exited, asked_with=asked_with)


def endings(members: list[Any]) -> list[Ending]:
    return [Ending(each.rank, each.exited.pid, 1.0, signal=each.exited.signal, error=each.error) for each in members]


def explained(machine: Machine, members: list[Any], kills: int) -> list[Ending]:
    watch = MemoryWatchdog(machine.counters())
    machine.v2("job", 2 * GIB, kills=kills, shortages=kills)
    watch.turn(members, 0.0)
    return watch.explain(endings(members))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path, "0::/job")
    made.v2("job", 2 * GIB, kills=0, shortages=0)
    return made


def test_the_kernel_chooses_the_largest(machine: Machine) -> None:
    """One kill, two ranks that ended by SIGKILL: somebody else has killed the other."""
    found = explained(machine, [member(0, 9, memory=GIB), member(1, 9, memory=3 * GIB), member(2, 15)], kills=1)
    assert [ending.out_of_memory is not None for ending in found] == [False, True, False]
    killed = found[1].out_of_memory
    assert killed is not None
    assert (killed.used, killed.limit, killed.group, killed.pid) == (3 * GIB, 2 * GIB, "/job", found[1].pid)
    assert [ending.memory for ending in found] == [GIB, 3 * GIB, None]


def test_two_kills_two_ranks(machine: Machine) -> None:
    found = explained(machine, [member(0, 9, GIB), member(1, 9, GIB), member(2, 9, 3 * GIB, asked_with=9)], kills=2)
    assert [ending.out_of_memory is not None for ending in found] == [True, True, False], "the last was the agent's"


def test_no_kill_no_word_of_memory(machine: Machine) -> None:
    found = explained(machine, [member(0, 9, GIB)], kills=0)
    assert found[0].out_of_memory is None
    assert found[0].shared_memory is None


def test_a_loaders_worker_that_was_killed(machine: Machine) -> None:
    said = "DataLoader worker (pid 4194400) is killed by signal: Killed. "
    found = explained(machine, [member(0, None, said=said)], kills=1)
    assert found[0].out_of_memory is not None
    assert found[0].out_of_memory.pid == 4194400


@pytest.mark.parametrize(
    "said",
    [
        "DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's workers are …",
        "unable to allocate shared memory(shm) for file </torch_12_3_0>: No space left on device (28)",
        "",
    ],
    ids=["loader", "no space", "SIGBUS"],
)
def test_shared_memory_is_looked_at(said: str, machine: Machine) -> None:
    found = explained(machine, [member(0, None if said else signal.SIGBUS, said=said)], kills=0)
    space = os.statvfs("/dev/shm")
    assert found[0].shared_memory is not None
    assert found[0].shared_memory.total == space.f_blocks * space.f_frsize
    plain = explained(machine, [member(0, None, said="No space left on device: 'checkpoint.pt'")], kills=0)
    assert plain[0].shared_memory is None
