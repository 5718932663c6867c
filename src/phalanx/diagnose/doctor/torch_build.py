"""torch as it is installed: its version, numpy, backends, GPUs, and phalanx's C library."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx import torch_compat
from phalanx.diagnose.doctor.finding import Facts, Judgement, error, having, info, ok, warning
from phalanx.diagnose.doctor.software import pip_install
from phalanx.system import in_bytes, procfs

_OLDEST_TORCH = torch_compat.as_text(torch_compat.OLDEST)
_NUMPY = "'numpy>=1.26'"
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
    driver = procfs.nvidia_driver()
    version = next((word for word in driver.split() if word[:1].isdigit()), None)
    nodes = [node for node in Path("/dev").glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdigit()]
    return SystemGpus(version or driver or None, len(nodes), environ.get("CUDA_VISIBLE_DEVICES"))


# ---- checks


def torch(facts: Facts) -> Judgement:
    found = facts.torch
    install = f"{pip_install(facts)} --upgrade 'torch>={_OLDEST_TORCH}'"
    if found.is_missing:
        return error("not installed", install)
    if found.version is not None and version_of(found.version) < torch_compat.OLDEST:
        return error(f"{found.version}, older than {_OLDEST_TORCH}", install)
    if found.problem is not None:
        where = f" from {found.file}" if found.file else ""
        return error(f"cannot be imported{where}: {found.problem}", _fix_torch(facts))
    advice = "put the environment on a local disk; was this the first time?"
    return warning(f"{found.version}, imported in {found.seconds:.1f} s", advice, found.seconds > _SLOW_IMPORT)


def numpy(facts: Facts) -> Judgement:
    version, problem = facts.torch.numpy, facts.torch.numpy_problem
    install = f"{pip_install(facts)} --upgrade"
    if version is None:
        return info(_NOT_ASKED) if problem is None else error(f"cannot be imported: {problem}", f"{install} {_NUMPY}")
    if version_of(version) < (1, 26):
        return error(f"{version}, older than 1.26", f"{install} {_NUMPY}")
    return error(f"{version} does not fit this torch ({problem})", f"{install} torch numpy") if problem else ok(version)


def backends(facts: Facts) -> Judgement:
    found = facts.torch
    if _is_broken(facts):
        return info(_NOT_ASKED)
    there = [*(["shm"] if found.library else []), *found.backends]
    value = having(there, [name for name in ("shm", "gloo", "nccl", "mpi") if name not in there])
    if not found.backends:
        return error(value, f"this torch was built without them: {pip_install(facts)} --force-reinstall torch")
    advice = "GPUs are slow without nccl: install a build of torch with it"
    return warning(value, advice, bool(found.gpus and found.cuda) and "nccl" not in there)


def devices(facts: Facts) -> Judgement:
    """The GPUs that torch can use; and if there are others, why it cannot."""
    found, seen = facts.torch, facts.gpus
    driver = f", driver {seen.driver}" if seen.driver else ""
    if found.gpus:
        kinds = [f"{gpu.name} with {in_bytes(gpu.bytes)}" if gpu.bytes else gpu.name for gpu in found.gpus]
        counted = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
        is_amd = any(code.startswith("gfx") for code in found.architectures)
        return ok(f"{counted}{driver}, {'ROCm' if is_amd else 'CUDA'} {found.cuda}" if found.cuda else counted)
    if seen.nodes:
        return _idle_gpus(facts, f"{seen.nodes} GPU{'s' * (seen.nodes > 1)}{driver}")
    if seen.driver:
        advice = "in a container: docker run --gpus all …; else look at nvidia-smi and lspci"
        return warning(f"no GPU, though there is a driver ({seen.driver})", advice)
    return ok("no GPU; ranks are on the CPU")


def _idle_gpus(facts: Facts, value: str) -> Judgement:
    """The system has GPUs, and torch has none."""
    found, visible = facts.torch, facts.gpus.visible
    if visible is not None and visible.strip() in ("", "-1"):
        return ok(f"{value}, hidden by CUDA_VISIBLE_DEVICES={visible!r}")
    if _is_broken(facts):
        return ok(value)
    if not found.cuda:
        return warning(f"{value}, but this torch is for CPUs", "install a build of torch with CUDA to use them")
    value = f"{value}, but torch (CUDA {found.cuda}) cannot use them: {found.cuda_problem or 'it sees none'}"
    return error(value, "nvidia-smi shows what the driver can; install the torch that fits it")


def library(facts: Facts) -> Judgement:
    found = facts.torch
    if found.library:
        return ok(found.library)
    if found.library_problem is None:
        return info(_NOT_ASKED)
    if facts.platform != "linux":
        return info(found.library_problem)
    advice = (
        f"install a C compiler (apt-get install gcc), then in phalanx's source directory "
        f"{pip_install(facts)} --no-deps --force-reinstall ."
    )
    if found.version is not None and version_of(found.version) < torch_compat.OLDEST_FOR_SHM:
        advice = f"{pip_install(facts)} --upgrade 'torch>={torch_compat.as_text(torch_compat.OLDEST_FOR_SHM)}'"
    return warning(found.library_problem, f"the ranks use gloo, which is slower: {advice}")


def version_of(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as numbers, to be compared."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:2])


def _is_broken(facts: Facts) -> bool:
    return facts.torch.problem is not None or facts.torch.version is None


def _fix_torch(facts: Facts) -> str:
    """A torch that lies elsewhere was not installed here, and installing it again would not help."""
    file, here = facts.torch.file, facts.python
    if file and not file.startswith((here.prefix, here.base_prefix)):
        return f"it lies outside this environment: unset PYTHONPATH ({shlex.quote(here.executable)} -m site shows more)"
    return f"{pip_install(facts)} --force-reinstall torch"
