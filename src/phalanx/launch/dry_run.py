"""``--dry-run``: the table of every process, before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from phalanx.env import MAIN_VARIABLES
from phalanx.errors import UsageError
from phalanx.launch.spec import device_count, network
from phalanx.launch.spec.launch_spec import MOST_PROCESSES, LaunchSpec, Placement, placements, worker_environment
from phalanx.launch.spec.network import Route
from phalanx.system.ports import LOOPBACK


def show(spec: LaunchSpec, environ: Mapping[str, str]) -> None:
    """Prints the table, and what all ranks have in common below it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    route = _route(spec)
    hosts = spec.host_list.hosts if spec.host_list is not None else ()
    sizes = [host.slots or spec.nproc_per_node for host in hosts] or [spec.nproc_per_node] * spec.nnodes[1]
    if sum(sizes) > MOST_PROCESSES:
        raise UsageError(f"--dry-run prints a row for each of {sum(sizes)} ranks; give {MOST_PROCESSES} at most.")
    everyone = placements(sizes)
    seen = device_count.visible_accelerators(environ)
    gpus = spec.devices if spec.devices is not None else seen.names
    interfaces = route.settings() if isinstance(route, Route) else {}
    environments = [_environment(spec, place, environ, interfaces) for place in everyone]
    common = {
        name: values.pop()
        for name in (*MAIN_VARIABLES, spec.devices_variable, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if len(values := {environment.get(name, "") for environment in environments}) == 1 and values != {""}
    }
    table = Table(box=SIMPLE_HEAD, title=_title(spec, sizes), title_justify="left")
    for column in ("node", *(["host"] if hosts else []), "rank", "local rank", "device"):
        table.add_column(column, justify="right")
    table.add_column("own variables", overflow="fold")
    for place, environment in zip(everyone, environments, strict=True):
        own = [
            f"{name}={environment[name]}"
            for name in (*MAIN_VARIABLES, spec.devices_variable)
            if name in environment and name not in common
        ]
        host = [hosts[place.node].name] if hosts else []
        numbers = (str(place.rank), str(place.local_rank))
        table.add_row(str(place.node), *host, *numbers, device_of(place, seen.device, gpus, spec), " ".join(own))
    # A table in a file or a pipe is for a program or a search: no folding to an imagined screen.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    console.print(table)
    console.print("all:      ", " ".join(f"{name}={value}" for name, value in common.items()), soft_wrap=True)
    console.print("runs:     ", command_of(spec), soft_wrap=True)
    if isinstance(route, Route):
        console.print("network:  ", f"{route.interface}, {route.address} towards {route.master}", soft_wrap=True)
    elif route is not None:
        console.print("network:  ", route, soft_wrap=True)
    console.print("with:     ", spec.program.interpreter or interpreter(), soft_wrap=True)


def _title(spec: LaunchSpec, sizes: Sequence[int]) -> str:
    nodes = len(sizes)
    if len(set(sizes)) == 1:
        text = f"{nodes} node{'s' * (nodes > 1)} × {sizes[0]} processes = {sum(sizes)} ranks"
    else:
        text = f"{nodes} nodes, {' + '.join(map(str, sizes))} processes = {sum(sizes)} ranks"
    if spec.nnodes[0] != nodes:
        text += f" (with all of {spec.nnodes[0]} to {nodes} nodes)"
    return text


def _route(spec: LaunchSpec) -> Route | str | None:
    """The network that would be used, or why none: a table may be wanted before the machines are there."""
    if spec.nnodes[1] == 1 or spec.master_addr == LOOPBACK or spec.host_list is not None:
        return None
    try:
        return network.find_route(spec.master_addr, spec.interface, spec.local_addr)
    except UsageError as error:
        return str(error)


def _environment(
    spec: LaunchSpec, place: Placement, environ: Mapping[str, str], interfaces: Mapping[str, str]
) -> dict[str, str]:
    base = {**environ, **device_count.thread_setting(place.local_world_size, environ)}
    address = spec.master_addr if place.nnodes > 1 else LOOPBACK
    if spec.host_list is not None and address == LOOPBACK:
        address = f"(that of {spec.host_list.hosts[0].name})"
    environment = worker_environment(base, spec, place, (address, spec.master_port), 0, spec.run_id, interfaces)
    if not spec.master_port:
        environment["MASTER_PORT"] = "(a free one)"
    return environment


def device_of(place: Placement, kind: str, gpus: tuple[str, ...], spec: LaunchSpec) -> str:
    """The device a rank would take: local_rank counts within the visible GPUs, and begins again after the last."""
    if not gpus:
        return "cpu"
    sees_one = spec.virtual_local_rank or gpus[0].startswith("MIG-")
    return f"{kind}:{0 if sees_one else place.local_rank % len(gpus)}"


def command_of(spec: LaunchSpec) -> str:
    program = spec.program
    injected = [f"{program.inject_local_rank}=<local rank>"] if program.inject_local_rank else []
    start = {"command": [], "module": ["python", "-m"]}.get(program.kind, ["python"])
    return " ".join([*start, program.target, *injected, *program.args])


def interpreter() -> str:
    """Which Python the workers run in: the launcher's own."""
    kind = ""
    if os.environ.get("CONDA_PREFIX") and sys.prefix.startswith(os.environ["CONDA_PREFIX"]):
        kind = f", conda environment {os.environ.get('CONDA_DEFAULT_ENV', sys.prefix)}"
    elif sys.prefix != sys.base_prefix:
        kind = f", virtual environment {sys.prefix}"
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "missing"
    return f"{sys.executable} (Python {sys.version.split()[0]}, torch {torch}{kind})"
