"""torch as it is installed: its version, numpy, backends, GPUs, and phalanx's C library."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx import torch_compat
from phalanx.diagnose.doctor.finding import Facts, Finding, having, judged
from phalanx.diagnose.doctor.software import pip_install
from phalanx.system import procfs
from phalanx.system.sizes import in_bytes

_OLDEST_TORCH = torch_compat.as_text(torch_compat.OLDEST)
_OLDEST_NUMPY = (1, 26)
_SLOW_IMPORT = 20.0
_NOT_ASKED = "not asked: first, torch has to be importable"


@dataclass(frozen=True)
class SystemGpus:
    """The GPUs that the system shows, whether torch can use them or not."""

    driver: str | None
    nodes: int
    """Device files, one a GPU."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES."""


def read_gpus(environ: Mapping[str, str]) -> SystemGpus:
    first = procfs.nvidia_driver()
    version = next((word for word in first.split() if word[:1].isdigit()), None)
    nodes = [node for node in Path("/dev").glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdigit()]
    return SystemGpus(version or (first or None), len(nodes), environ.get("CUDA_VISIBLE_DEVICES"))


def torch(facts: Facts) -> Finding:
    found = facts.torch
    install = f"{pip_install(facts)} --upgrade 'torch>={_OLDEST_TORCH}'"
    if found.is_missing:
        return Finding("torch", "not installed", "error", install)
    if found.version is not None and version_of(found.version) < torch_compat.OLDEST:
        return Finding("torch", f"{found.version}, older than {_OLDEST_TORCH}", "error", install)
    if found.problem is not None:
        where = f" from {found.file}" if found.file else ""
        return Finding("torch", f"cannot be imported{where}: {found.problem}", "error", _mend_torch(facts))
    value = f"{found.version}, imported in {found.seconds:.1f} s"
    advice = "put the environment on a local disk; was this the first time?"
    return judged("torch", value, advice, warning=found.seconds > _SLOW_IMPORT)


def numpy(facts: Facts) -> Finding:
    found = facts.torch
    install = f"{pip_install(facts)} --upgrade 'numpy>=1.26'"
    if found.numpy is None:
        if found.numpy_problem is None:
            return Finding("numpy", _NOT_ASKED, "info")
        return Finding("numpy", f"cannot be imported: {found.numpy_problem}", "error", install)
    if version_of(found.numpy) < _OLDEST_NUMPY:
        return Finding("numpy", f"{found.numpy}, older than 1.26", "error", install)
    if found.numpy_problem is not None:
        advice = f"{pip_install(facts)} --upgrade torch numpy"
        return Finding("numpy", f"{found.numpy} does not fit this torch ({found.numpy_problem})", "error", advice)
    return Finding("numpy", found.numpy)


def backends(facts: Facts) -> Finding:
    found = facts.torch
    if _is_broken(facts):
        return Finding("backends", _NOT_ASKED, "info")
    there = [*(["shm"] if found.library else []), *found.backends]
    missing = [name for name in ("shm", "gloo", "nccl", "mpi") if name not in there]
    value = having(there, missing)
    if not found.backends:
        advice = f"this torch was built without them: {pip_install(facts)} --force-reinstall torch"
        return Finding("backends", value, "error", advice)
    advice = "GPUs are slow without nccl: install a build of torch with it"
    return judged("backends", value, advice, warning=bool(found.gpus) and "nccl" not in there)


def devices(facts: Facts) -> Finding:
    """GPUs that torch can use; and if there are others, why it cannot."""
    found, seen = facts.torch, facts.gpus
    if found.gpus:
        kinds = [f"{gpu.name} with {in_bytes(gpu.bytes)}" for gpu in found.gpus]
        counted = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
        return Finding("devices", f"{counted}{_driver(facts)}, CUDA {found.cuda}")
    if found.accelerator:
        return Finding("devices", found.accelerator)
    if seen.nodes:
        return _idle_gpus(facts)
    if seen.driver:
        advice = "in a container: docker run --gpus all …; else look at nvidia-smi and lspci"
        return Finding("devices", f"no GPU, though there is a driver ({seen.driver})", "warning", advice)
    return Finding("devices", "no GPU; ranks are on the CPU")


def _idle_gpus(facts: Facts) -> Finding:
    """The system has GPUs, and torch has none."""
    found, seen = facts.torch, facts.gpus
    value = f"{seen.nodes} GPU{'s' * (seen.nodes > 1)}{_driver(facts)}"
    if seen.visible is not None and seen.visible.strip() in ("", "-1"):
        return Finding("devices", f"{value}, hidden by CUDA_VISIBLE_DEVICES={seen.visible!r}")
    if _is_broken(facts):
        return Finding("devices", value)
    if not found.cuda:
        advice = "install a build of torch with CUDA to use them"
        return Finding("devices", f"{value}, but this torch is for CPUs", "warning", advice)
    value = f"{value}, but torch (CUDA {found.cuda}) cannot use them: {found.cuda_problem or 'it sees none'}"
    return Finding("devices", value, "error", "nvidia-smi shows what the driver can; install the torch that fits it")


def _driver(facts: Facts) -> str:
    return f", driver {facts.gpus.driver}" if facts.gpus.driver else ""


def library(facts: Facts) -> Finding:
    found = facts.torch
    if found.library:
        return Finding("C library", found.library)
    if found.library_problem is None:
        return Finding("C library", _NOT_ASKED, "info")
    if facts.platform != "linux":
        return Finding("C library", found.library_problem, "info")
    advice = (
        f"install a C compiler (apt-get install gcc), then in phalanx's source directory "
        f"{pip_install(facts)} --no-deps --force-reinstall ."
    )
    if found.version is not None and version_of(found.version) < torch_compat.OLDEST_FOR_SHM:
        advice = f"{pip_install(facts)} --upgrade 'torch>={torch_compat.as_text(torch_compat.OLDEST_FOR_SHM)}'"
    return Finding("C library", found.library_problem, "warning", f"the ranks use gloo, which is slower: {advice}")


def version_of(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as numbers, to be compared."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:2])


def _is_broken(facts: Facts) -> bool:
    return facts.torch.problem is not None or facts.torch.version is None


def _mend_torch(facts: Facts) -> str:
    """One that lies elsewhere was not installed here, and installing it again would not help."""
    file, here = facts.torch.file, facts.python
    if file and not file.startswith((here.prefix, here.base_prefix)):
        return f"it lies outside this environment: unset PYTHONPATH ({shlex.quote(here.executable)} -m site shows more)"
    return f"{pip_install(facts)} --force-reinstall torch"
