"""The system, the Python that runs phalanx, its environment, and the command on PATH."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.diagnose.doctor.finding import Facts, Finding, judged

_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Python:
    """The interpreter that runs phalanx, and so the ranks."""

    version: tuple[int, int, int]
    executable: str
    prefix: str
    base_prefix: str
    is_conda: bool
    active: str | None
    """The environment that the shell has activated, by VIRTUAL_ENV or CONDA_PREFIX."""
    command: str | None
    """The `phalanx` on PATH."""
    command_python: str | None
    """The interpreter that it starts, if it says."""
    command_is_ours: bool | None
    """Whether that one is ``executable``; None when it does not say."""


# ---- reading


def kernel() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def container() -> str | None:
    marks = {
        "kubernetes": "/var/run/secrets/kubernetes.io",
        "docker": "/.dockerenv",
        "podman": "/run/.containerenv",
    }
    return next((kind for kind, mark in marks.items() if Path(mark).exists()), None)


def read_python(environ: Mapping[str, str]) -> Python:
    """This interpreter, the environment it belongs to, and the one that the shell means."""
    active = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX") or None
    command = shutil.which("phalanx", path=environ.get("PATH"))
    interpreter = None if command is None else _interpreter_of(Path(command))
    return Python(
        version=sys.version_info[:3],
        executable=sys.executable,
        prefix=os.path.realpath(sys.prefix),
        base_prefix=os.path.realpath(sys.base_prefix),
        is_conda=(Path(sys.prefix) / "conda-meta").is_dir(),
        active=None if active is None else os.path.realpath(active),
        command=command,
        command_python=interpreter,
        command_is_ours=None if interpreter is None else _is_same(Path(interpreter), Path(sys.executable)),
    )


def _interpreter_of(command: Path) -> str | None:
    """From the first line of a script that pip has made; None for one of another kind, such as a shim of pyenv."""
    try:
        with command.open("rb") as file:
            first, second = file.readline(4096), file.readline(4096)
    except OSError:
        return None
    line = second if first.startswith(b"#!/bin/sh") else first  # where the path is too long for the kernel
    words = line.decode(errors="replace").removeprefix("#!").removeprefix("'''exec'").split()
    name = words[0].strip("\"'") if words else ""
    return name if Path(name).name.startswith("python") else None


def _is_same(one: Path, other: Path) -> bool:
    """The file alone does not tell: the interpreters of all virtual environments are links to one."""
    try:
        return one.samefile(other) and one.parent.samefile(other.parent)
    except OSError:
        return False


# ---- judgement


def system(facts: Facts) -> Finding:
    value = facts.kernel + (f", in a container ({facts.container})" if facts.container else "")
    advice = "phalanx run needs Linux or WSL2; here: python train.py"
    return judged("system", value, advice, error=facts.platform != "linux")


def python(facts: Facts) -> Finding:
    version, oldest = (".".join(map(str, each)) for each in (facts.python.version, _OLDEST_PYTHON))
    advice = f"phalanx needs {oldest} or newer: python{oldest} -m venv .venv"
    is_old = facts.python.version < _OLDEST_PYTHON
    return judged("python", f"{version}, {facts.python.executable}", advice, error=is_old)


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
        f"to use that: {shlex.quote(f'{here.active}/bin/python')} -m phalanx; to use this: {_activate(here)}",
    )


def command(facts: Facts) -> Finding:
    """Whether who types `phalanx` gets this one."""
    here = facts.python
    if here.command is None:
        return Finding("command", f"phalanx is not on PATH: type {shlex.quote(here.executable)} -m phalanx", "info")
    if here.command_is_ours is None:
        return Finding("command", f"phalanx is {here.command}, which does not show which Python it starts", "info")
    if here.command_is_ours:
        return Finding("command", f"phalanx is {here.command}")
    return Finding(
        "command",
        f"phalanx is {here.command}, of another Python ({here.command_python})",
        "warning",
        f"to get this one: {_activate(here)}, or {shlex.quote(here.executable)} -m phalanx",
    )


def _kind(here: Python) -> str:
    if here.is_conda:
        return "conda"
    return "venv" if here.prefix != here.base_prefix else "no environment, the Python of"


def _activate(here: Python) -> str:
    if here.is_conda:
        return f"conda activate {shlex.quote(here.prefix)}"
    if here.prefix != here.base_prefix:
        return f"source {shlex.quote(f'{here.prefix}/bin/activate')}"
    return f"export PATH={shlex.quote(str(Path(here.executable).parent))}:$PATH"


def pip_install(facts: Facts) -> str:
    """The command that installs into the environment of this Python."""
    return f"{shlex.quote(facts.python.executable)} -m pip install"
