"""Checks of what is installed: Python, its environment, torch, and the C library. Pure functions of facts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from phalanx import torch_compat
from phalanx.diagnose.checkup import Finding, having, in_bytes
from phalanx.diagnose.facts import Facts, Python

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = torch_compat.as_text(torch_compat.OLDEST)
_OLDEST_NUMPY = (1, 26)
_SLOW_IMPORT = 20.0


def system(facts: Facts) -> Finding:
    value = facts.kernel + (f", in a container ({facts.container})" if facts.container else "")
    if facts.platform != "linux":
        return Finding("system", value, "error", "phalanx run needs Linux or WSL2; here: python train.py")
    return Finding("system", value)


def python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python.version))
    value = f"{version}, {facts.python.executable}"
    if facts.python.version < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return Finding("python", value, "error", f"phalanx needs {oldest} or newer: python{oldest} -m venv .venv")
    return Finding("python", value)


def environment(facts: Facts) -> Finding:
    """Of which kind it is, and whether the shell means the same."""
    here = facts.python
    value = f"{_kind(here)} {here.prefix}"
    # A virtual environment may stand on conda's Python while conda's environment is the active one.
    if here.active is None or here.active in (here.prefix, here.base_prefix):
        return Finding("environment", value)
    return Finding(
        "environment",
        f"{value}, but the active one is {here.active}",
        "warning",
        f"to use that: {_quoted(f'{here.active}/bin/python')} -m phalanx; to use this: {_activate(here)}",
    )


def command(facts: Facts) -> Finding:
    """Whether who types `phalanx` gets this one."""
    here = facts.python
    if here.command is None:
        return Finding("command", f"phalanx is not on PATH: type {_quoted(here.executable)} -m phalanx", "info")
    if here.command_is_ours is None:
        return Finding("command", f"phalanx is {here.command}, which does not say which Python it starts", "info")
    if here.command_is_ours:
        return Finding("command", f"phalanx is {here.command}")
    return Finding(
        "command",
        f"phalanx is {here.command}, of another Python ({here.command_python})",
        "warning",
        f"to get this one: {_activate(here)}, or {_quoted(here.executable)} -m phalanx",
    )


def torch(facts: Facts) -> Finding:
    found = facts.torch
    install = f"{_pip(facts)} --upgrade 'torch>={_OLDEST_TORCH}'"
    if found.is_missing:
        return Finding("torch", "not installed", "error", install)
    if found.version is not None and version_of(found.version) < torch_compat.OLDEST:
        return Finding("torch", f"{found.version}, older than {_OLDEST_TORCH}", "error", install)
    if found.problem is not None:
        where = f" from {found.file}" if found.file else ""
        return Finding("torch", f"cannot be imported{where}: {found.problem}", "error", _mend_torch(facts))
    value = f"{found.version}, imported in {found.seconds:.1f} s"
    if found.seconds > _SLOW_IMPORT:
        return Finding("torch", value, "warning", "put the environment on a local disk; was this the first time?")
    return Finding("torch", value)


def numpy(facts: Facts) -> Finding:
    found = facts.torch
    install = f"{_pip(facts)} --upgrade 'numpy>=1.26'"
    if found.numpy is None:
        unknown = "not asked: first, torch has to be importable"
        if found.numpy_problem is None:
            return Finding("numpy", unknown, "info")
        return Finding("numpy", f"cannot be imported: {found.numpy_problem}", "error", install)
    if version_of(found.numpy) < _OLDEST_NUMPY:
        return Finding("numpy", f"{found.numpy}, older than 1.26", "error", install)
    if found.numpy_problem is not None:
        advice = f"{_pip(facts)} --upgrade torch numpy"
        return Finding("numpy", f"{found.numpy} does not fit this torch ({found.numpy_problem})", "error", advice)
    return Finding("numpy", found.numpy)


def backends(facts: Facts) -> Finding:
    found = facts.torch
    if _is_broken(facts):
        return Finding("backends", "not asked: first, torch has to be importable", "info")
    there = [*(["shm"] if found.library else []), *found.backends]
    missing = [name for name in ("shm", "gloo", "nccl", "mpi") if name not in there]
    value = having(there, missing)
    if not found.backends:
        advice = f"this torch was built without them: {_pip(facts)} --force-reinstall torch"
        return Finding("backends", value, "error", advice)
    if found.cards and "nccl" not in there:
        return Finding("backends", value, "warning", "cards are slow without nccl: install a build of torch with it")
    return Finding("backends", value)


def devices(facts: Facts) -> Finding:
    """Cards that torch can use; and if there are others, why it cannot."""
    found, seen = facts.torch, facts.cards
    if found.cards:
        kinds = [f"{card.name} with {in_bytes(card.bytes)}" for card in found.cards]
        counted = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
        return Finding("devices", f"{counted}{_driver(facts)}, CUDA {found.cuda}")
    if found.accelerator:
        return Finding("devices", found.accelerator)
    if seen.nodes:
        return _idle_cards(facts)
    if seen.driver:
        advice = "in a container: docker run --gpus all …; else look at nvidia-smi and lspci"
        return Finding("devices", f"no card, though there is a driver ({seen.driver})", "warning", advice)
    return Finding("devices", "no card; ranks are on the CPU")


def _idle_cards(facts: Facts) -> Finding:
    """The system has cards, and torch has none."""
    found, seen = facts.torch, facts.cards
    value = f"{seen.nodes} card{'s' * (seen.nodes > 1)}{_driver(facts)}"
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
    return f", driver {facts.cards.driver}" if facts.cards.driver else ""


def library(facts: Facts) -> Finding:
    found = facts.torch
    if found.library:
        return Finding("C library", found.library)
    if found.library_problem is None:
        return Finding("C library", "not asked: first, torch has to be importable", "info")
    if facts.platform != "linux":
        return Finding("C library", found.library_problem, "info")
    advice = (
        f"install a C compiler (apt-get install gcc), then in phalanx's source directory {_pip(facts)} --no-deps "
        "--force-reinstall ."
    )
    if found.version is not None and version_of(found.version) < torch_compat.OLDEST_FOR_SHM:
        advice = f"{_pip(facts)} --upgrade 'torch>={torch_compat.as_text(torch_compat.OLDEST_FOR_SHM)}'"
    return Finding("C library", found.library_problem, "warning", f"the ranks use gloo, which is slower: {advice}")


def version_of(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as numbers, to be compared."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:2])


def _is_broken(facts: Facts) -> bool:
    return facts.torch.problem is not None or facts.torch.version is None


def _kind(here: Python) -> str:
    if here.is_conda:
        return "conda"
    return "venv" if here.prefix != here.base_prefix else "no environment, the Python of"


def _activate(here: Python) -> str:
    if here.is_conda:
        return f"conda activate {_quoted(here.prefix)}"
    if here.prefix != here.base_prefix:
        return f"source {_quoted(f'{here.prefix}/bin/activate')}"
    return f"export PATH={_quoted(str(Path(here.executable).parent))}:$PATH"


def _mend_torch(facts: Facts) -> str:
    """One that lies elsewhere was not installed here, and installing it again would not help."""
    file, here = facts.torch.file, facts.python
    if file and not file.startswith((here.prefix, here.base_prefix)):
        return f"it lies outside this environment: unset PYTHONPATH ({_quoted(here.executable)} -m site shows more)"
    return f"{_pip(facts)} --force-reinstall torch"


def _pip(facts: Facts) -> str:
    return f"{_quoted(facts.python.executable)} -m pip install"


def _quoted(text: str) -> str:
    return shlex.quote(text)
