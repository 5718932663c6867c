"""Cores and GPUs of this machine, counted without torch.

Importing torch to count GPUs would cost the launcher a second and could initialise CUDA before a fork.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.launch.spec.launch_spec import LaunchSpec, check_processes
from phalanx.system import cgroups


def thread_setting(
    processes: int, environ: Mapping[str, str], bindings: Sequence[Sequence[int]] | None = None
) -> dict[str, str]:
    """Returns OMP_NUM_THREADS: cores divided by local ranks, unless it is set already or there is only one rank.

    ``bindings``: the CPUs of each rank; none gets more threads than CPUs.
    """
    if "OMP_NUM_THREADS" in environ or (processes == 1 and bindings is None):
        return {}
    bound = min((len(cpus) for cpus in bindings or ()), default=cgroups.usable_cores())
    return {"OMP_NUM_THREADS": str(max(1, min(cgroups.usable_cores() // processes, bound)))}


def visible_gpus(environ: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Returns the GPUs that a process sees, as CUDA_VISIBLE_DEVICES names them; local_rank is an index into these."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return tuple(name.strip() for name in listed.split(",") if name.strip() not in ("", "-1"))
    return tuple(str(index) for index in range(len(gpu_numbers(dev))))


def gpu_numbers(dev: Path) -> list[int]:
    """Returns the driver's numbers of the NVIDIA devices below ``dev``."""
    return sorted(int(node.name[6:]) for node in dev.glob("nvidia[0-9]*") if node.name[6:].isdigit())


def describe_threads(environ: Mapping[str, str], spec: LaunchSpec) -> str:
    """Returns a text about the launcher's choice of threads; empty if it was not its choice."""
    count = environ.get("OMP_NUM_THREADS")
    if count == os.environ.get("OMP_NUM_THREADS"):
        return ""
    how = f"cores {cgroups.usable_cores()}, divided by ranks"
    if spec.cpus is not None:
        how += f", at most those of --numa-binding {spec.numa_binding}"
    return f", OMP_NUM_THREADS={count} for each ({how})"


def choose_gpus(
    asked: str, environ: Mapping[str, str], dev: Path = Path("/dev"), *, must_exist: bool = True
) -> tuple[str, ...]:
    """Reads ``--devices 0,3``: indices into the visible GPUs, so that it composes with a scheduler's choice.

    ``must_exist``: they are GPUs of this machine.
    """
    try:
        indices = [int(part) for part in asked.split(",")]
    except ValueError:
        raise UsageError(f"--devices {asked!r} is not a list of numbers; give them like 0,3.") from None
    if len(set(indices)) != len(indices):
        raise UsageError(f"--devices {asked} names a GPU twice; give each once.")
    visible = visible_gpus(environ, dev)
    if min(indices) < 0:
        raise UsageError(f"--devices {asked} has a negative number; GPUs count from 0.")
    if not visible and not (must_exist and _has_no_gpu(environ, dev)):
        return tuple(str(index) for index in indices)
    if not visible:
        raise UsageError(f"--devices {asked}, but no GPU is visible here; leave it out to run on CPUs.")
    for index in indices:
        if not 0 <= index < len(visible):
            raise UsageError(
                f"--devices {asked} asks for GPU {index}, but {len(visible)} GPU(s) are visible "
                f"({','.join(visible)}); count from 0 to {len(visible) - 1}."
            )
    return tuple(visible[index] for index in indices)


def _has_no_gpu(environ: Mapping[str, str], dev: Path) -> bool:
    """Returns True if there is no GPU; those of AMD, WSL2 and Jetson exist, but cannot be counted by their files."""
    others = ("kfd", "dxg", "nvgpu", "nvhost-gpu")
    return environ.get("CUDA_VISIBLE_DEVICES") is not None or not any((dev / name).exists() for name in others)


def process_count(asked: str, gpus: tuple[str, ...]) -> int:
    """Reads ``--nproc-per-node``: a number, or cpu, gpu, auto."""
    if asked == "cpu":
        return cgroups.usable_cores()
    if asked == "gpu":
        if not gpus:
            raise UsageError("--nproc-per-node gpu, but no CUDA GPU is visible here; give a number, or cpu.")
        return len(gpus)
    if asked == "auto":
        return len(gpus) or cgroups.usable_cores()
    try:
        count = int(asked)
    except ValueError:
        raise UsageError(f"--nproc-per-node {asked!r} is unknown; give a number, auto, cpu or gpu.") from None
    return check_processes(count, "--nproc-per-node")
