"""`phalanx run` as a task of srun: the tasks of a step are one run, whose nodes meet by SLURM's variables.

With one task on each node, the task is that node's agent and starts --nproc-per-node ranks. With several, each task is
the agent of one rank, which keeps the CPUs and GPUs that SLURM has given to the task.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from phalanx.cluster import slurm
from phalanx.errors import UsageError
from phalanx.launch.spec import network
from phalanx.launch.spec.launch_spec import Placement


def join_step(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Placement | None:
    """Fills in the flags of several nodes, and returns this task.

    Returns None for a task that is alone, by --standalone too, or if the user has given flags of several nodes.
    """
    task = slurm.detect(environ)
    if task is None or task.world_size == 1:
        return None
    if arguments.hosts is not None or arguments.hostfile is not None:
        raise UsageError(
            f"srun has started {task.world_size} tasks, and each would start all hosts; leave out srun or the hosts."
        )
    is_elastic = arguments.rdzv_endpoint or arguments.rdzv_backend != "static"
    if arguments.nnodes is not None or arguments.standalone or is_elastic or arguments.node_rank:
        return None
    arguments.nnodes, arguments.node_rank = str(task.world_size), task.rank
    if task.master is not None:
        arguments.master_addr = arguments.master_addr or _address(task.master[0], environ)
        arguments.master_port = arguments.master_port or task.master[1]
    if arguments.rdzv_id == "none":  # an agent of another job may have come to the same port
        arguments.rdzv_id = task.job
    return Placement(task.rank, task.local_rank, task.node, task.world_size, task.local_size, task.nodes)


def _address(first: str, environ: Mapping[str, str]) -> str:
    """Returns the first host; on itself, where Debian's /etc/hosts leads to 127.0.1.1, its address for the others."""
    hosts = slurm.hosts(environ.get("SLURM_STEP_NODELIST") or first)
    if len(hosts) == 1 or first != hosts[0] or not network.leads_to_loopback(first):
        return first
    return network.find_route(hosts[1]).address
