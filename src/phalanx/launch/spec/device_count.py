"""Cores and accelerators of this machine, counted without torch.

Importing torch to count GPUs would cost the launcher a second and could initialise CUDA before a fork.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from phalanx import events
from phalanx.errors import UsageError
from phalanx.launch.spec.launch_spec import LaunchSpec, check_processes
from phalanx.system import cgroups

_NOT_COUNTED = ("kfd", "dxg", "nvgpu", "nvhost-gpu")


def thread_setting(
    processes: int,
    environ: Mapping[str, str],
    bindings: Sequence[Sequence[int]] | None = None,
    shared: int | None = None,
) -> dict[str, str]:
    """Returns OMP_NUM_THREADS: cores divided by local ranks, unless it is set already or there is only one rank.

    ``bindings``: the CPUs of each rank; none gets more threads than CPUs. ``shared``: cores of all of them together.
    """
    if "OMP_NUM_THREADS" in environ or (processes == 1 and bindings is None and shared is None):
        return {}
    usable = cgroups.usable_cores()
    bound = min((len(cpus) for cpus in bindings or ()), default=usable)
    return {"OMP_NUM_THREADS": str(max(1, min((shared or usable) // processes, bound)))}


class Accelerators(NamedTuple):
    """The accelerators that a process sees. ``device``: torch's name of their kind."""

    device: str
    variable: str
    """It shows a process some of them."""
    names: tuple[str, ...]
    """As the variable has them; a local rank is an index into these."""


def visible_accelerators(
    environ: Mapping[str, str], dev: Path = Path("/dev"), system: Path = Path("/sys")
) -> Accelerators:
    """Returns those of the first kind that this machine has, or that a variable names."""
    amd = _render_nodes(dev, system, ("amdgpu",), "libc10_hip.so")
    if amd and "ROCR_VISIBLE_DEVICES" in environ:  # HIP counts among these
        amd = len(_names(environ["ROCR_VISIBLE_DEVICES"]))
    kinds = (
        ("cuda", ("CUDA_VISIBLE_DEVICES",), len(gpu_numbers(dev))),
        ("cuda", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), amd),
        ("npu", ("ASCEND_RT_VISIBLE_DEVICES",), len(gpu_numbers(dev, "davinci"))),
        ("xpu", ("ZE_AFFINITY_MASK",), _render_nodes(dev, system, ("i915", "xe"), "libc10_xpu.so")),
    )
    device, variables, count = max(kinds, key=lambda kind: (kind[2] > 0, any(name in environ for name in kind[1])))
    listed = next((environ[name] for name in variables if name in environ), None)
    return Accelerators(device, variables[0], tuple(map(str, range(count))) if listed is None else _names(listed))


def _names(listed: str) -> tuple[str, ...]:
    """Reads such a variable as the drivers do: what follows a negative or empty name does not count."""
    names = (name.strip() for name in listed.split(","))
    return tuple(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def gpu_numbers(dev: Path, prefix: str = "nvidia") -> list[int]:
    """Returns the driver's numbers of the devices below ``dev``: of NVIDIA's, or of those with another name."""
    names = os.listdir(str(dev)) if dev.is_dir() else []  # noqa: PTH208 (Path objects cost more than the reading)
    tails = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(int(tail) for tail in tails if tail.isdigit())


def _render_nodes(dev: Path, system: Path, drivers: tuple[str, ...], library: str) -> int:
    """Counts the GPUs with one of these drivers, if torch was built for them: many CPUs have one for the screen."""
    homes = [(system / f"class/drm/renderD{n}/device").resolve() for n in gpu_numbers(dev / "dri", "renderD")]
    # A part of an AMD GPU has no driver, but its name begins with it.
    found = [home for home in homes if {(home / "driver").resolve().name, home.name.split("_")[0]} & {*drivers}]
    return len(found) if found and _torch_has(library) else 0


def _torch_has(library: str) -> bool:
    from importlib.util import find_spec  # does not import torch

    spec = find_spec("torch")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "lib" / library).exists()


def evidence_settings(spec: LaunchSpec, environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Returns the variables by which NCCL and torch write what they know of a failure into the run directory.

    None without GPUs. What the user has set is left alone, and with it what belongs to it.
    """
    where, visible = directory.absolute(), visible_accelerators(environ)
    if visible.device != "cuda" or not (visible.names or spec.devices) or "%" in str(where):  # which NCCL would replace
        return {}
    files = (os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf")  # noqa: PTH111 (there may be no home)
    found = {}
    if not environ.keys() & {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} and not any(map(os.path.exists, files)):
        found = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{where}/{events.NCCL_LOG.format('%p')}"}
    if not environ.keys() & {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}:
        found["TORCH_FR_DUMP_TEMP_FILE"] = f"{where}/{events.FLIGHT_TRACE}"
    return found


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
    visible = visible_accelerators(environ, dev).names
    if min(indices) < 0:
        raise UsageError(f"--devices {asked} has a negative number; GPUs count from 0.")
    # GPUs of WSL2 and Jetson exist, but cannot be counted by their files.
    is_known = "CUDA_VISIBLE_DEVICES" in environ or not any((dev / name).exists() for name in _NOT_COUNTED)
    if not visible and not (must_exist and is_known):
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


def process_count(asked: str, gpus: tuple[str, ...]) -> int:
    """Reads ``--nproc-per-node``: a number, or cpu, gpu, auto."""
    if asked == "cpu":
        return cgroups.usable_cores()
    if asked == "gpu":
        if not gpus:
            raise UsageError("--nproc-per-node gpu, but no GPU is visible here; give a number, or cpu.")
        return len(gpus)
    if asked == "auto":
        return len(gpus) or cgroups.usable_cores()
    try:
        count = int(asked)
    except ValueError:
        raise UsageError(f"--nproc-per-node {asked!r} is unknown; give a number, auto, cpu or gpu.") from None
    return check_processes(count, "--nproc-per-node")
