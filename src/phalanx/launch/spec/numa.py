"""The CPUs of each rank on a NUMA machine: what ``--numa-binding`` means, as torch defines it, read from /sys alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.launch.spec import device_count
from phalanx.system import text

_NVIDIA = "0x10de"
_DISPLAY = "0x03"

Nodes = Mapping[int, frozenset[int]]
"""The usable CPUs of each NUMA node that has any."""


def bindings(
    mode: str,
    ranks: int,
    gpus: Sequence[str],
    allowed: Iterable[int],
    system: Path = Path("/sys"),
    dev: Path = Path("/dev"),
) -> tuple[tuple[int, ...], ...] | None:
    """Returns the CPUs of each local rank; None on a machine whose kernel knows no NUMA nodes.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them; rank N has the Nth. Without any, the ranks are spread over the nodes.
        allowed: the CPUs that this process may use.
    """
    nodes = _nodes(system, frozenset(allowed))
    if not nodes:
        return None
    homes = _homes(ranks, gpus, nodes, system, dev)
    found = []
    for rank, home in enumerate(homes[:ranks]):
        sharers = [other for other, its_home in enumerate(homes) if its_home == home]
        found.append(tuple(sorted(_choose(mode, nodes, home, sharers.index(rank), len(sharers), system))))
    return tuple(found)


def _homes(ranks: int, gpus: Sequence[str], nodes: Nodes, system: Path, dev: Path) -> list[int]:
    """Returns the NUMA node of each rank. GPUs without a rank count too: torch leaves them their share of the cores."""
    order = sorted(nodes)
    if len(order) == 1:
        return order * max(ranks, len(gpus))
    if not gpus:  # neighbours stay together, and the nodes furthest apart are used first
        return [order[rank * len(order) // ranks] for rank in range(ranks)]
    near = gpu_nodes(gpus, system, dev)
    for gpu, node in zip(gpus, near, strict=True):
        if node not in nodes:
            raise UsageError(
                f"--numa-binding: GPU {gpu} is at NUMA node {node}, and this process may use none of its CPUs; "
                "widen its affinity, or leave the flag out."
            )
    return [near[rank % len(near)] for rank in range(max(ranks, len(near)))]


def _choose(mode: str, nodes: Nodes, home: int, position: int, count: int, system: Path) -> Iterable[int]:
    """Returns the CPUs of the rank at ``position`` among the ``count`` ranks of this node."""
    cpus = nodes[home]
    if mode == "socket":
        socket = _socket(system, min(cpus))
        return frozenset().union(*(each for each in nodes.values() if _socket(system, min(each)) == socket))
    if mode == "exclusive":
        cores = [group for _, group in sorted(_grouped(cpus, lambda cpu: _core(system, cpu)).items())]
        each, more = divmod(len(cores), count)
        if not each:
            raise UsageError(
                f"--numa-binding exclusive: NUMA node {home} has {len(cores)} core(s) for {count} ranks or GPUs; "
                "start fewer ranks, or use node."
            )
        start = position * each + min(position, more)  # the first ones get what does not divide
        return frozenset().union(*cores[start : start + each + (position < more)])
    if mode == "core-complex":
        caches = _grouped(cpus, lambda cpu: _cache(system, cpu))
        largest_first = sorted(caches.items(), key=lambda item: (-len(item[1]), item[0]))
        return largest_first[position % len(caches)][1]
    return cpus


def _grouped(cpus: Iterable[int], key: Callable[[int], int]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), set()).add(cpu)
    return groups


# ---- /sys


def gpu_nodes(gpus: Sequence[str], system: Path, dev: Path) -> list[int]:
    """Returns the NUMA node of each GPU. GPUs are numbered in the order of their PCI addresses."""
    listed = (system / "bus/pci/devices").glob("*")
    paths = sorted(path for path in listed if _is_gpu(path))
    # /sys shows a container all GPUs of the machine, /dev its own.
    numbers = device_count.gpu_numbers(dev)
    if numbers and numbers[-1] < len(paths):
        paths = [paths[number] for number in numbers]
    found = []
    for gpu in gpus:
        if not (gpu.isascii() and gpu.isdigit() and int(gpu) < len(paths)):
            raise UsageError(
                f"--numa-binding: /sys does not show where GPU {gpu} is; name GPUs by their numbers in "
                "CUDA_VISIBLE_DEVICES, or leave the flag out."
            )
        # -1 where the firmware has no number: torch takes the first node.
        found.append(max(0, int(text(paths[int(gpu)] / "numa_node") or 0)))
    return found


def _is_gpu(path: Path) -> bool:
    return text(path / "vendor") == _NVIDIA and text(path / "class").startswith(_DISPLAY)


def _nodes(system: Path, allowed: frozenset[int]) -> Nodes:
    nodes = {}
    for path in (system / "devices/system/node").glob("node[0-9]*"):
        if path.name[4:].isdigit() and (cpus := _numbers(text(path / "cpulist")) & allowed):
            nodes[int(path.name[4:])] = frozenset(cpus)
    return nodes


def _cpu(system: Path, cpu: int) -> Path:
    return system / f"devices/system/cpu/cpu{cpu}"


def _socket(system: Path, cpu: int) -> int:
    return int(text(_cpu(system, cpu) / "topology/physical_package_id") or 0)


def _core(system: Path, cpu: int) -> int:
    """Returns the first CPU of the same physical core, as the number of the core."""
    return min(_numbers(text(_cpu(system, cpu) / "topology/thread_siblings_list")), default=cpu)


def _cache(system: Path, cpu: int) -> int:
    """Returns the first CPU with the same last-level cache, as the number of the cache."""
    levels = {}
    for path in (_cpu(system, cpu) / "cache").glob("index[0-9]*"):
        if text(path / "type") in ("Unified", "Data"):
            levels[int(text(path / "level") or 0)] = _numbers(text(path / "shared_cpu_list"))
    return min(levels[max(levels)], default=cpu) if levels else 0


def _numbers(text: str) -> set[int]:
    """Reads ``0-2,7``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
