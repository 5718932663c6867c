"""The system, the Python that runs phalanx, its environment, and the command on PATH."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.diagnose.doctor.finding import Facts, Judgement, error, info, ok, warning

_OLDEST_PYTHON = (3, 11)
_SHELLS = ("sh", "bash", "dash", "ash", "zsh")


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
    """The interpreter that it starts, if that is known."""
    command_is_ours: bool | None
    """That interpreter is ``executable``; None when it is not known."""


def container(environ: Mapping[str, str]) -> str | None:
    """The kind of container that this process is in, by a file that each of them has."""
    if environ.get("KUBERNETES_SERVICE_HOST"):  # a pod without an account has no such file
        return "kubernetes"
    service = "/var/run/secrets/kubernetes.io"
    marks = {"kubernetes": service, "docker": "/.dockerenv", "podman": "/run/.containerenv"}
    return next((kind for kind, mark in marks.items() if Path(mark).exists()), None)


def read_python(environ: Mapping[str, str]) -> Python:
    """This interpreter, the environment it belongs to, and the one that the shell has activated."""
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
    """The interpreter in the first line of a script that pip has made; None for a script of another kind."""
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
    """Compares the directories too: the interpreters of all virtual environments are links to one file."""
    try:
        return one.samefile(other) and one.parent.samefile(other.parent)
    except OSError:
        return False


# ---- checks


def system(facts: Facts) -> Judgement:
    value = facts.kernel + (f", in a container ({facts.container})" if facts.container else "")
    return error(value, "phalanx run needs Linux or WSL2; here: python train.py", facts.platform != "linux")


def init(facts: Facts) -> Judgement:
    """The process that gets a container's signals."""
    if not facts.init:
        return info("not in a container")
    shell, *words = facts.init.split()
    runs_script = Path(shell).name in _SHELLS and any(not word.startswith("-") for word in words)
    advice = "it does not pass on SIGTERM, so nothing is saved at an eviction: write exec before the command in it"
    return warning(facts.init if len(facts.init) <= 80 else f"{facts.init[:79]}…", advice, runs_script)


def python(facts: Facts) -> Judgement:
    version, oldest = (".".join(map(str, each)) for each in (facts.python.version, _OLDEST_PYTHON))
    advice = f"phalanx needs {oldest} or newer: python{oldest} -m venv .venv"
    return error(f"{version}, {facts.python.executable}", advice, facts.python.version < _OLDEST_PYTHON)


def environment(facts: Facts) -> Judgement:
    """The kind of environment, and whether the shell has activated the same."""
    here = facts.python
    kind = "conda" if here.is_conda else "venv" if _is_venv(here) else "no environment, the Python of"
    value = f"{kind} {here.prefix}"
    # A virtual environment may be based on conda's Python while conda's environment is the active one.
    if here.active is None or here.active in (here.prefix, here.base_prefix):
        return ok(value)
    other = shlex.quote(f"{here.active}/bin/python")
    advice = f"to use that: {other} -m phalanx; to use this: {_activate(here)}"
    return warning(f"{value}, but the active one is {here.active}", advice)


def command(facts: Facts) -> Judgement:
    """Checks that the command `phalanx` starts this Python."""
    here = facts.python
    this_one = f"{shlex.quote(here.executable)} -m phalanx"
    if here.command is None:
        return info(f"phalanx is not on PATH: type {this_one}")
    value = f"phalanx is {here.command}"
    if here.command_is_ours is None:
        return info(f"{value}, which does not show which Python it starts")
    if here.command_is_ours:
        return ok(value)
    advice = f"to get this one: {_activate(here)}, or {this_one}"
    return warning(f"{value}, of another Python ({here.command_python})", advice)


def _is_venv(here: Python) -> bool:
    return here.prefix != here.base_prefix


def _activate(here: Python) -> str:
    if here.is_conda:
        return f"conda activate {shlex.quote(here.prefix)}"
    if _is_venv(here):
        return f"source {shlex.quote(f'{here.prefix}/bin/activate')}"
    return f"export PATH={shlex.quote(str(Path(here.executable).parent))}:$PATH"


def pip_install(facts: Facts) -> str:
    """The command that installs into the environment of this Python."""
    return f"{shlex.quote(facts.python.executable)} -m pip install"
