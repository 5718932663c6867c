"""``phalanx run`` and ``python -m phalanx.launch``: from a command line to a run.

What cannot work is an error before anything starts. Then the zygote is started, and the agent imports the rest of
itself while the zygote imports torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from phalanx import env, messages, run_files, secret
from phalanx.errors import PortBusy, UsageError
from phalanx.launch import parse
from phalanx.launch.process.zygote_client import ZygoteClient
from phalanx.launch.spec import preflight
from phalanx.launch.spec.device_count import evidence_settings, thread_setting, visible_accelerators
from phalanx.launch.spec.launch_spec import LaunchSpec
from phalanx.system import cgroups, ports

if TYPE_CHECKING:
    from phalanx.launch.spec.network import Route


def run(arguments: list[str], *, is_launch: bool = False) -> int:
    """``phalanx run``, with the flags of torchrun.

    ``is_launch``: ``python -m phalanx.launch``, with the flags of ``python -m torch.distributed.launch``.
    """
    if os.getpid() == 1:
        from phalanx.launch.process import container_init  # only in a container

        container_init.continue_in_child()
    spec, dry_run = parse.parse(arguments, os.environ, is_launch=is_launch)
    if dry_run:
        from phalanx.launch.dry_run import show

        show(spec, os.environ)
        return 0
    if spec.host_list is not None:
        from phalanx.launch.remote.conductor import conduct

        return conduct(spec, arguments, os.environ, is_launch=is_launch)
    return run_node(spec, os.environ)


def remote() -> NoReturn:
    """The agent of one host, in a run that a command on another machine has started."""
    from phalanx.launch.remote import remote_agent

    remote_agent.main(parse.parse, run_node)


def run_node(spec: LaunchSpec, environ: Mapping[str, str]) -> int:
    """Starts this machine's part of a run and waits for its end; returns the exit code."""
    preflight.check(spec)
    spec = _bind(spec, environ)
    _raise_file_limit(spec)
    route = find_route(spec)
    secret.load(spec.secret_file, environ)
    if route is None:
        secret.make()
    with contextlib.ExitStack() as stack:
        listener = _listener(spec, route)
        if listener is not None:
            stack.enter_context(contextlib.closing(listener))
        directory = run_files.new_run_directory(Path(spec.log_dir), run_files.new_run_id())
        environment = {
            **{name: value for name, value in environ.items() if name != secret.VARIABLE},
            **_threads(spec, environ),
            **evidence_settings(spec, environ, directory),
            "PHALANX_RUN_DIR": str(directory),
        }
        zygote = ZygoteClient(
            environment,
            start_method="exec" if spec.program.kind == "command" else spec.start_method,
            preload=spec.preload,
            late=preflight.late_imports(spec),
            script_directory=preflight.script_directory(spec),
            listener=listener,
            with_nodes=route is not None,
        )
    with contextlib.closing(zygote):
        from phalanx.launch.agent.agent import Agent  # while the zygote imports torch

        return Agent(spec, environment, zygote, directory, route).run()


def _threads(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    if (task := spec.task_place) is None or spec.cpus is not None:
        return thread_setting(spec.nproc_per_node, environ, spec.cpus)
    # Its share of the step's CPUs on this node, even if it is not bound to it.
    shared = env.integer(environ, "SLURM_CPUS_ON_NODE") or cgroups.usable_cores()
    return thread_setting(task.local_world_size, environ, shared=shared)


def _bind(spec: LaunchSpec, environ: Mapping[str, str]) -> LaunchSpec:
    """Adds the CPUs of each rank, if they are to be bound."""
    if spec.numa_binding is None:
        return spec
    from phalanx.launch.spec import numa

    seen = spec.devices if spec.devices is not None else visible_accelerators(environ).names
    gpus = seen if spec.devices_variable == "CUDA_VISIBLE_DEVICES" else ()  # where others are is not known
    cpus = numa.bindings(spec.numa_binding, spec.nproc_per_node, gpus, os.sched_getaffinity(0))
    return messages.replace(spec, cpus=cpus)


def _listener(spec: LaunchSpec, route: Route | None) -> socket.socket | None:
    """The socket that the keeper serves: the ranks' store when there is one node, or the one where the nodes meet."""
    if route is None:
        return ports.listen(ports.LOOPBACK, spec.master_port)
    if spec.rdzv_backend == "static":
        return ports.listen(route.address, spec.master_port) if spec.node_rank == 0 else None
    from phalanx.launch.spec import network

    is_own = network.is_own(route.master)
    if not (is_own if spec.is_host is None else spec.is_host):
        return None
    try:
        return ports.listen(route.master if is_own else route.address, spec.master_port)
    except PortBusy:
        return None  # another agent of this machine may serve it; if it is anything else, the keeper reports it


def find_route(spec: LaunchSpec) -> Route | None:
    """The way to the other nodes; None when there are none."""
    fewest, most = spec.nnodes
    if most == 1:
        return None
    from phalanx.launch.spec import network

    if spec.task is not None and spec.task.nnodes == 1:
        return network.Route(ports.LOOPBACK, ports.LOOPBACK, "lo")
    is_static = spec.rdzv_backend == "static"
    if is_static and fewest != most:
        raise UsageError(
            f"--nnodes {fewest}:{most} is a range, and nodes that come and go need --rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT; or give their number."
        )
    if spec.master_addr == ports.LOOPBACK:
        if is_static:
            raise UsageError(f"--nnodes {most} needs --master-addr: the address of the machine with --node-rank 0.")
        raise UsageError(f"--nnodes {most} needs --rdzv-endpoint: the address of one of the machines, where they meet.")
    if not spec.master_port:
        raise UsageError(f"--nnodes {most} needs --master-port: a port that is free on {spec.master_addr}.")
    return network.await_route(lambda: _route(spec), spec.rdzv_timeout)


def _route(spec: LaunchSpec) -> Route:
    from phalanx.launch.spec import network

    route = network.find_route(spec.master_addr, spec.interface, spec.local_addr)
    if spec.rdzv_backend == "static" and spec.node_rank == 0 and not network.is_own(route.master):
        # A name may still lead to the pod that had it before.
        kind = UsageError if route.master == spec.master_addr else network.NotYet
        raise kind(
            f"--node-rank 0 is the machine with the master's address, but {spec.master_addr} is not this one's; "
            "give this machine's address, or another --node-rank."
        )
    return route


def files_needed(ranks: int) -> int:
    """Three pipes for each rank, and more while it starts. `phalanx doctor` gives the same number."""
    return 12 * ranks + 64


def _raise_file_limit(spec: LaunchSpec) -> None:
    """The usual soft limit of 1024 is a default, not a rule."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(spec.nproc_per_node)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(f"{spec.nproc_per_node} ranks need {needed} open files, but the limit (ulimit -n) is {hard}.")
    if needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
