"""A task of a SLURM step, started by ``srun``.

A shell inside an allocation (``salloc``, ``srun --pty bash``, a batch script) has most of the same variables, but is
no task among others: it has to be a world of one.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping

from phalanx import env
from phalanx.cluster.situation import Situation, master_from, port_for
from phalanx.errors import UsageError

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM numbers its batch, extern and interactive steps from here on."""
_MOST_HOSTS = 100_000
_MPIRUN = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""mpirun starts its own daemons with srun, and its ranks inherit their variables."""


def detect(environ: Mapping[str, str]) -> Situation | None:
    if not is_task(environ):
        return None
    rank = env.require_integer(environ, "SLURM_PROCID", beside="SLURM_JOB_ID")
    world_size = env.integer(environ, "SLURM_STEP_NUM_TASKS")
    if world_size is None:
        world_size = env.require_integer(environ, "SLURM_NTASKS", beside="SLURM_PROCID")
    local_rank = env.require_integer(environ, "SLURM_LOCALID", beside="SLURM_PROCID")
    node = env.integer(environ, "SLURM_NODEID") or 0
    sizes = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    nodes = len(sizes) or env.integer(environ, "SLURM_NNODES") or 1
    return Situation(
        kind="slurm",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=sizes[node] if 0 <= node < len(sizes) else max(1, world_size // nodes),
        node=node,
        nodes=nodes,
        master=master_from(environ) or _master(environ),
        job=f"slurm-{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}",
    )


def is_task(environ: Mapping[str, str]) -> bool:
    """Returns True if srun has started this process, as one of several or the only one."""
    is_inside = "SLURM_PROCID" in environ and not any(name in environ for name in _MPIRUN)
    return is_inside and not _is_shell(environ)


def _is_shell(environ: Mapping[str, str]) -> bool:
    step = env.integer(environ, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return True
    # Steps that are started in a shell of `srun --pty` inherit the variable, but not the terminal.
    return "SLURM_PTY_PORT" in environ and has_terminal()


def has_terminal() -> bool:
    """Returns True if this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def _master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodelist:
        return None
    job = env.integer(environ, "SLURM_JOB_ID") or 0
    return hosts(nodelist)[0], port_for(job * 31 + (env.integer(environ, "SLURM_STEP_ID") or 0))


def hosts(nodelist: str) -> list[str]:
    """Returns node03, node04, node05, node9, gpu1 for ``node[03-05,9],gpu1``.

    `scontrol show hostnames` does the same, but a container does not have it.
    """
    parts = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+", nodelist)
    names: list[str] = []
    if parts and ",".join(parts) == nodelist:
        names = list(itertools.islice(itertools.chain.from_iterable(map(_expand, parts)), _MOST_HOSTS + 1))
    if not 0 < len(names) <= _MOST_HOSTS:
        raise _unreadable(nodelist)
    return names


def _expand(part: str) -> Iterator[str]:
    texts = re.split(r"\[([^\]]*)\]", part)  # each second one is what was in brackets
    choices = [_numbers(text, part) if index % 2 else [text] for index, text in enumerate(texts)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str, part: str) -> Iterator[str]:
    """Yields 03, 04, 05, 9 for ``03-05,9``."""
    for text in ranges.split(","):
        first, dash, last = text.partition("-")
        last = last if dash else first
        if not all(re.fullmatch(r"[0-9]{1,9}", each) for each in (first, last)):
            raise _unreadable(part)
        count = int(last) - int(first) + 1
        if not 0 < count <= _MOST_HOSTS:
            raise _unreadable(part)
        yield from (f"{int(first) + index:0{len(first)}d}" for index in range(count))


def _unreadable(nodelist: str) -> UsageError:
    return UsageError(
        f"SLURM's list of hosts {nodelist!r} cannot be read; set MASTER_ADDR and MASTER_PORT, or name the hosts of "
        "`phalanx run` with -H."
    )


def allocated_tasks(environ: Mapping[str, str]) -> list[int]:
    """Returns the tasks of each node that the user has asked for by -n or --ntasks-per-node; empty if not.

    Without SLURM_NTASKS the other variable has SLURM's default, which counts CPUs for --exclusive.
    """
    sizes = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))
    return sizes if sum(sizes) == env.integer(environ, "SLURM_NTASKS") else []


def gpus_of_tasks(environ: Mapping[str, str], tasks: int) -> str | None:
    """Returns ``a100:8`` for 4 tasks with --gpus-per-task=a100:2; None if the job does not give GPUs to tasks."""
    found = re.fullmatch(r"(.+:)?([0-9]{1,4})", environ.get("SLURM_GPUS_PER_TASK", ""))
    return f"{found[1] or ''}{int(found[2]) * tasks}" if found else None


def tasks_per_node(text: str) -> list[int]:
    """Returns [4, 4, 2] for ``4(x2),2``."""
    sizes: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"([1-9][0-9]{0,8})(?:\(x([0-9]{1,9})\))?", part)
        if found is None or int(found[2] or 1) > _MOST_HOSTS:
            raise UsageError(f"SLURM_TASKS_PER_NODE={text!r} cannot be read; it should look like 4(x2),2.")
        sizes += [int(found[1])] * int(found[2] or 1)
    return sizes
