"""A task of a SLURM step, started by ``srun``.

A shell inside an allocation (``salloc``, ``srun --pty bash``, a batch script) has most of the same variables, but is
no task among others: it has to be a world of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx import env
from phalanx.cluster.situation import Situation, master_from, port_for
from phalanx.errors import UsageError

_SHELLS = ("interactive", "bash", "sh", "zsh")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM numbers its batch, extern and interactive steps from here on."""


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
        local_size=sizes[node] if node < len(sizes) else max(1, world_size // nodes),
        node=node,
        nodes=nodes,
        master=master_from(environ) or _master(environ),
    )


def is_task(environ: Mapping[str, str]) -> bool:
    """Returns True if srun has started this process, as one of several or the only one."""
    return "SLURM_PROCID" in environ and not _is_shell(environ)


def _is_shell(environ: Mapping[str, str]) -> bool:
    step = env.integer(environ, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return True
    return "SLURM_PTY_PORT" in environ or environ.get("SLURM_JOB_NAME") in _SHELLS


def _master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not hosts:
        return None
    job = env.integer(environ, "SLURM_JOB_ID") or 0
    return first_host(hosts), port_for(job * 31 + (env.integer(environ, "SLURM_STEP_ID") or 0))


def first_host(nodelist: str) -> str:
    """Returns ``node03`` for ``node[03-05,9],gpu1``."""
    found = re.match(r"(?P<name>[^,\[]+)(\[(?P<first>\d+)[^\]]*\](?P<rest>[^,]*))?", nodelist)
    if found is None:
        raise UsageError(f"SLURM's list of hosts {nodelist!r} cannot be read; set MASTER_ADDR and MASTER_PORT.")
    return found["name"] + (found["first"] or "") + (found["rest"] or "")


def tasks_per_node(text: str) -> list[int]:
    """Returns [4, 4, 2] for ``4(x2),2``."""
    sizes: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise UsageError(f"SLURM_TASKS_PER_NODE={text!r} cannot be read; it should look like 4(x2),2.")
        sizes += [int(found[1])] * int(found[2] or 1)
    return sizes
