"""Looks at this machine and writes down what is there. Judging it is the checks' business."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from phalanx import env
from phalanx.diagnose import gather_network, probe
from phalanx.diagnose.facts import Cards, Cores, Facts, Limits, Memory, Python, Space
from phalanx.system import cores, procfs
from phalanx.system.cgroups import Allowance, allowance

_TOOLS = ("ssh", "srun", "mpirun", "py-spy")


def gather(environ: Mapping[str, str], ranks: int | None = None) -> Facts:
    """Everything about this machine; ``ranks`` is what the user means to start on it."""
    with probe.started(environ) as torch:  # which takes longest, so the rest happens meanwhile
        allowed = allowance()
        return Facts(
            platform=sys.platform,
            kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
            container=_container(),
            asked_ranks=ranks,
            python=python(environ),
            cards=_cards(environ),
            cores=_cores(environ),
            memory=_memory(allowed),
            shared_memory=space(Path("/dev/shm")),
            limits=_limits(allowed),
            network=gather_network.network(environ),
            clock=gather_network.clock(),
            runs=_where_runs_go(environ),
            tools={name: shutil.which(name, path=environ.get("PATH")) for name in _TOOLS},
            torch=torch.answer(),
        )


def python(environ: Mapping[str, str]) -> Python:
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


def _container() -> str | None:
    marks = {
        "kubernetes": "/var/run/secrets/kubernetes.io",
        "docker": "/.dockerenv",
        "podman": "/run/.containerenv",
    }
    return next((kind for kind, mark in marks.items() if Path(mark).exists()), None)


def _cards(environ: Mapping[str, str]) -> Cards:
    first = procfs.nvidia_driver()
    version = next((word for word in first.split() if word[:1].isdigit()), None)
    nodes = [node for node in Path("/dev").glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdigit()]
    return Cards(version or (first or None), len(nodes), environ.get("CUDA_VISIBLE_DEVICES"))


def _cores(environ: Mapping[str, str]) -> Cores:
    return Cores(*cores.count(), environ.get("OMP_NUM_THREADS"))


def _memory(allowed: Allowance) -> Memory:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit = allowed.memory if allowed.memory is not None and allowed.memory < memory.total else None
    return Memory(memory.total, memory.available, limit, allowed.memory_used, swap.total)


def space(path: Path) -> Space | None:
    """Of the file system there; None when there is nothing."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(str(path), usage.total, usage.free, os.access(path, os.W_OK | os.X_OK))


def _where_runs_go(environ: Mapping[str, str]) -> Space:
    asked = environ.get(f"{env.PET_PREFIX}LOG_DIR") or "runs"
    try:
        directory = Path(asked).absolute()
    except OSError:  # the working directory is gone
        return Space(asked, 0, 0, is_writable=False)
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    found = space(there) if os.path.isdir(there) else None  # noqa: PTH112 (Path's raises where one may not look)
    return Space(str(directory), 0, 0, is_writable=False) if found is None else replace(found, path=str(directory))


def _limits(allowed: Allowance) -> Limits:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return Limits(None, None, None, 0, False)

    def limit(kind: int) -> tuple[int | None, int | None]:
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
        return soft, hard

    own = limit(resource.RLIMIT_NPROC)[0] if os.geteuid() else None  # root is not bound by its own
    used = _threads_of_this_user() if own is not None else 0
    by_container = allowed.processes is not None and (
        own is None or allowed.processes - allowed.processes_used < own - used
    )
    if by_container:
        own, used = allowed.processes, allowed.processes_used
    return Limits(*limit(resource.RLIMIT_NOFILE), own, used, by_container)


def _threads_of_this_user() -> int:
    """The kernel counts threads, not processes."""
    import psutil

    count, me = 0, os.getuid()
    for process in psutil.process_iter():
        try:
            if process.uids().real == me:
                count += process.num_threads()
        except psutil.Error:  # it has ended, or is hidden
            continue
    return count
