"""Which CPUs a rank gets: trees like /sys made here, torch's own answers for them, and real ranks on this machine."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.numa import binding as torchs

from phalanx.errors import UsageError
from phalanx.launch.spec import device_count, numa
from phalanx.launch.spec.launch_spec import NUMA_BINDINGS
from phalanx.system import cgroups
from tests.conftest import WITHOUT_TORCH, Runner, by_rank

NODES, CORES, SMT = 4, 4, 2
CPUS = range(NODES * CORES * SMT)
NODE_OF_GPU = (3, 3, 0, 1, 1)


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """2 sockets of 2 nodes of 4 cores; a core has CPUs c and c + 16; two cores share an L3; a node without CPUs."""
    cores = NODES * CORES
    for node in range(NODES):
        first = node * CORES
        mine = f"{first}-{first + CORES - 1},{first + cores}-{first + cores + CORES - 1}"
        write(tmp_path / f"devices/system/node/node{node}/cpulist", mine)
    write(tmp_path / "devices/system/node/node4/cpulist", "")
    write(tmp_path / "devices/system/node/possible", f"0-{NODES - 1}")
    for cpu in CPUS:
        core = cpu % cores
        path = tmp_path / f"devices/system/cpu/cpu{cpu}"
        write(path / "topology/thread_siblings_list", f"{core},{core + cores}")
        write(path / "topology/physical_package_id", core // (2 * CORES))
        pair = core - core % 2
        shared = {
            "0": f"{core},{core + cores}",
            "1": f"{core}",
            "3": f"{pair}-{pair + 1},{pair + cores}-{pair + cores + 1}",
        }
        for index, (level, kind) in {"0": (1, "Data"), "1": (1, "Instruction"), "3": (3, "Unified")}.items():
            write(path / f"cache/index{index}/level", level)
            write(path / f"cache/index{index}/type", kind)
            write(path / f"cache/index{index}/shared_cpu_list", shared[index])
    for gpu, node in enumerate(NODE_OF_GPU):
        path = tmp_path / f"bus/pci/devices/0000:{gpu + 10:02x}:00.0"
        write(path / "vendor", "0x10de")
        write(path / "class", "0x030200")
        write(path / "numa_node", node)
    write(tmp_path / "bus/pci/devices/0000:01:00.0/vendor", "0x10de")  # its audio function, before all of them
    write(tmp_path / "bus/pci/devices/0000:01:00.0/class", "0x040300")
    return tmp_path


@pytest.fixture
def reference(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], set[int]]:
    """What torch would bind a rank to on that machine."""

    def there(path: str) -> str:
        return str(machine / path.removeprefix("/sys/"))

    monkeypatch.setattr(torchs, "open", lambda path: io.StringIO(Path(there(path)).read_text()), raising=False)
    real = os.listdir
    monkeypatch.setattr(torchs.os, "listdir", lambda path: real(there(path) if path.startswith("/sys/") else path))
    monkeypatch.setattr(torchs, "_get_allowed_cpu_indices_for_current_thread", lambda: set(ALLOWED))
    monkeypatch.setattr(torchs, "_get_gpu_count", lambda: len(NODE_OF_GPU))
    monkeypatch.setattr(torchs, "_get_numa_node_index_for_gpu_index", lambda gpu_index: NODE_OF_GPU[gpu_index])

    def ask(mode: str, gpu: int) -> set[int]:
        options = torchs.NumaOptions(torchs.AffinityMode(mode))
        return torchs._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options)

    return ask


ALLOWED = frozenset(CPUS) - {1, 13, 29}  # a cpuset that has taken one thread of a core, and a whole core


@pytest.mark.parametrize("mode", NUMA_BINDINGS)
def test_the_cpus_near_a_gpu_are_those_of_torch(
    mode: str, machine: Path, reference: Callable[[str, int], set[int]], tmp_path: Path
) -> None:
    gpus = [str(gpu) for gpu in range(len(NODE_OF_GPU))]
    found = numa.bindings(mode, 5, gpus, ALLOWED, machine, tmp_path)
    assert found is not None
    assert [set(cpus) for cpus in found] == [reference(mode, gpu) for gpu in range(5)]
    # Three ranks: the GPUs without one keep their share.
    assert numa.bindings(mode, 3, gpus, ALLOWED, machine, tmp_path) == found[:3]


def test_a_container_has_some_of_the_gpus(machine: Path, tmp_path: Path) -> None:
    for name in ("nvidia2", "nvidia4", "nvidiactl"):
        (tmp_path / name).touch()
    assert numa.gpu_nodes(["0", "1"], machine, tmp_path) == [0, 1]
    for wrong in ("2", "GPU-8f3c"):
        with pytest.raises(UsageError, match=f"does not show where GPU {wrong} is; name GPUs by their numbers"):
            numa.gpu_nodes([wrong], machine, tmp_path)
    with pytest.raises(UsageError, match="GPU 3 is at NUMA node 1, and this process may use none of its CPUs"):
        numa.bindings("node", 1, ["3"], {0, 12}, machine, tmp_path / "no devices")


def test_without_gpus_the_ranks_are_spread_over_the_nodes(machine: Path) -> None:
    def bound(mode: str, ranks: int) -> tuple[tuple[int, ...], ...]:
        found = numa.bindings(mode, ranks, (), CPUS, machine)
        assert found is not None
        return found

    def nodes(ranks: int) -> list[int]:
        return [cpus[0] // CORES for cpus in bound("node", ranks)]

    assert nodes(2) == [0, 2], "one on each socket"
    assert nodes(4) == [0, 1, 2, 3]
    assert nodes(6) == [0, 0, 1, 2, 2, 3]
    assert bound("exclusive", 8)[1] == (2, 3, 18, 19)
    assert bound("core-complex", 8)[7] == (14, 15, 30, 31)
    assert bound("socket", 2)[1] == (*range(8, 16), *range(24, 32))
    with pytest.raises(UsageError, match=r"NUMA node 0 has 4 core\(s\) for 5 ranks or GPUs; start fewer ranks"):
        bound("exclusive", 20)


@pytest.mark.parametrize("mode", NUMA_BINDINGS)
def test_a_machine_without_numa_or_with_one_node(mode: str, tmp_path: Path) -> None:
    assert numa.bindings(mode, 2, ("0", "1"), {0, 1}, tmp_path) is None
    write(tmp_path / "devices/system/node/node0/cpulist", "0-3")  # and nothing else is told, nor where the GPUs are
    whole = (0, 1, 2, 3)
    shares = ((0, 1), (2, 3)) if mode == "exclusive" else (whole, whole)
    assert numa.bindings(mode, 2, ("0", "GPU-8f"), whole, tmp_path) == shares


def test_no_rank_has_more_threads_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "usable_cores", lambda: 16)
    assert device_count.thread_setting(2, {}, ((0, 1), (2, 3))) == {"OMP_NUM_THREADS": "2"}
    assert device_count.thread_setting(4, {}, ((*range(8),),) * 4) == {"OMP_NUM_THREADS": "4"}
    assert device_count.thread_setting(1, {}, ((*range(8),),)) == {"OMP_NUM_THREADS": "8"}
    assert device_count.thread_setting(1, {"OMP_NUM_THREADS": "9"}, ((0,),)) == {}


SCRIPT = """
import os, sys, threading
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
thread.start()
thread.join()
assert seen == [os.sched_getaffinity(0)]
print("cpus", sorted(seen[0]))
print("a pear, an apple\\nan or,ange")
print("last apple", end="")
print("noise\\nmy orange" if os.environ["RANK"] == "1" else "noise", file=sys.stderr)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("how", [(), WITHOUT_TORCH], ids=["fork", "exec"])
def test_ranks_are_bound_and_their_lines_filtered(
    how: tuple[str, ...], phalanx: Runner, script: Callable[..., str], latest: Path
) -> None:
    filters = ("--duplicate-stdout-filters", "apple,or,,ange", "--duplicate_stderr_filters=orange")
    ran = phalanx("run", "--nproc-per-node", "2", "--numa-binding", "exclusive", *how, *filters, script(SCRIPT))
    assert ran.code == 0, ran.err
    expected = numa.bindings("exclusive", 2, (), os.sched_getaffinity(0))
    assert expected is None or not set(expected[0]) & set(expected[1])
    own = expected or [sorted(os.sched_getaffinity(0))] * 2
    assert {rank: lines[0] for rank, lines in by_rank(ran).items()} == {
        rank: f"cpus {list(own[rank])}" for rank in range(2)
    }
    kept = (latest / "attempt_0/filtered_stdout.log").read_text().splitlines()
    lines = ("a pear, an apple", "an or,ange", "last apple")
    assert sorted(kept) == [f"[rank {rank}] {line}" for rank in range(2) for line in lines]
    assert (latest / "attempt_0/filtered_stderr.log").read_text() == "[rank 1] my orange\n"
