"""From a command line to a LaunchSpec: every value is checked, and an error names the flag and what it got."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx import env, messages
from phalanx.argparser import duration
from phalanx.errors import UsageError
from phalanx.launch import flags
from phalanx.launch.spec import device_count, launch_spec
from phalanx.launch.spec.launch_spec import LAST_CALL, MOST_PROCESSES, HostList, LaunchSpec, Program, ProgramKind
from phalanx.system.ports import LOOPBACK, check_port

_DEFAULT_PORT = {"static": 29500, "c10d": 29400}  # torchrun's
_START_METHODS = {"spawn": "exec", "forkserver": "fork"}  # torchrun's own values
_CONF = ("join_timeout", "timeout", "last_call_timeout", "is_host")


def parse(
    argv: Sequence[str], environ: Mapping[str, str], overrides: Mapping[str, object] = {}, *, is_launch: bool = False
) -> tuple[LaunchSpec, bool]:
    """The spec, and whether this is a --dry-run. ``overrides``: of flags, by the names that argparse gives them.

    ``is_launch``: for ``python -m phalanx.launch``, which also has the flags of torch.distributed.launch.
    """
    tables = {**flags.TABLE, **flags.LAUNCH_TABLE} if is_launch else flags.TABLE
    parser = flags.new_parser(tables, environ, "python -m phalanx.launch" if is_launch else "phalanx run")
    arguments = parser.parse_args(argv)
    vars(arguments).update(overrides)
    return _to_spec(arguments, environ), bool(arguments.dry_run)


def _to_spec(arguments: argparse.Namespace, environ: Mapping[str, str]) -> LaunchSpec:
    task = _srun_task(arguments, environ)
    host_list = _host_list(arguments, environ)
    is_here = host_list is None and not arguments.dry_run  # a table may be wanted where there are no GPUs
    gpus = None
    if arguments.devices is not None:
        gpus = device_count.choose_gpus(arguments.devices, environ, must_exist=is_here)
    seen = device_count.visible_accelerators(environ)
    visible = gpus if gpus is not None else seen.names
    asked = arguments.nproc_per_node if arguments.nproc_per_node is not None else str(len(gpus)) if gpus else "1"
    virtual, start_method = bool(arguments.virtual_local_rank), str(arguments.start_method)
    nproc = device_count.process_count(asked, visible)
    if task is not None and nproc > 1 and task.world_size > task.nnodes:
        raise UsageError(
            f"srun has started several tasks on a node, and each is asked for {nproc} processes; leave out "
            "--nproc-per-node, so that each task is a rank, or start one task on each node (--ntasks-per-node=1)."
        )
    limit = None if arguments.time_limit is None else duration(arguments.time_limit)
    if arguments.time_limit is not None and not limit:
        example = "90s, 45min, 3h50m or 1-12:00:00"
        raise UsageError(f"--time-limit is {arguments.time_limit!r}; give a time like {example}.")
    if arguments.requeue and not environ.get("SLURM_JOB_ID"):
        raise UsageError("--requeue is for SLURM jobs, and SLURM_JOB_ID is not set here; leave it out.")
    if not arguments.log_dir:
        raise UsageError("--log-dir is empty; give a directory, such as runs.")
    nodes = _nodes(arguments.nnodes)
    known = nproc if nodes == (1, 1) else MOST_PROCESSES  # another node may have more processes than this one
    return LaunchSpec(
        program=_program(arguments, environ),
        nproc_per_node=nproc,
        nnodes=nodes,
        node_rank=_node_rank(arguments, environ, nodes),
        **_meeting(arguments),
        interface=arguments.interface,
        local_addr=arguments.local_addr,
        run_id=arguments.rdzv_id,
        role=arguments.role,
        max_restarts=arguments.max_restarts,
        start_method=_START_METHODS.get(start_method, start_method),
        preload=tuple(name for name in arguments.preload.split(",") if name),
        backend=arguments.backend or env.backend_choice(environ) or "auto",
        shutdown_timeout=arguments.shutdown_timeout,
        time_limit=limit,
        stopped_exit_code=arguments.stopped_exit_code,
        requeue=bool(arguments.requeue),
        max_preemptions=arguments.max_preemptions,
        stall_after=arguments.stall_after,
        on_stall=arguments.on_stall,
        devices=visible if virtual and visible else gpus,
        devices_variable=seen.variable,
        virtual_local_rank=virtual,
        numa_binding=arguments.numa_binding,
        signals=_signals(arguments.signals_to_handle),
        log_dir=arguments.log_dir,
        redirects=_streams("--redirects", arguments.redirects, nproc, known),
        tee=_streams("--tee", arguments.tee, nproc, known),
        local_ranks_filter=_filter(arguments.local_ranks_filter, known),
        duplicate_filters={
            1: _texts(arguments.duplicate_stdout_filters),
            2: _texts(arguments.duplicate_stderr_filters),
        },
        host_list=host_list,
        task=task,
    )


def _srun_task(arguments: argparse.Namespace, environ: Mapping[str, str]) -> launch_spec.Placement | None:
    """This task of srun, if it is one among several that are to be one run."""
    if "SLURM_PROCID" not in environ:
        return None
    from phalanx.launch.spec.srun_step import join_step

    return join_step(arguments, environ)


def _host_list(arguments: argparse.Namespace, environ: Mapping[str, str]) -> HostList | None:
    """The hosts to be started from here, which count their own GPUs and cores, except for a --dry-run."""
    is_named = arguments.hosts is not None or arguments.hostfile is not None
    if not is_named and not environ.get("SLURM_JOB_NODELIST"):
        return None
    from phalanx.launch.spec.hosts import find_hosts, is_here  # a run on one machine starts without them

    host_list = find_hosts(arguments, environ)
    if host_list is None:
        return None
    alone = host_list.hosts[0] if len(host_list.hosts) == 1 else None
    if alone is not None and (is_here(alone) or environ.get("SLURMD_NODENAME") == alone.name):  # a plain run
        arguments.nproc_per_node = str(alone.slots) if alone.slots else arguments.nproc_per_node
        return None
    arguments.nnodes = str(len(host_list.hosts))
    if not arguments.dry_run:
        arguments.nproc_per_node, arguments.devices = "1", None
    return host_list


def _program(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Program:
    given: dict[ProgramKind, bool] = {
        "path": arguments.run_path,
        "command": arguments.no_python,
        "module": arguments.module,
    }
    kinds: list[ProgramKind] = [kind for kind, is_given in given.items() if is_given]
    if "command" in kinds and "module" in kinds:
        raise UsageError("--no-python and --module contradict each other; give one of them.")
    interpreter = environ.get("PYTHON_EXEC")
    program = Program(
        kind=kinds[0] if kinds else "script",
        target=arguments.training_script,
        args=tuple(arguments.training_script_args),
        interpreter=interpreter if not {"path", "command"} & set(kinds) else None,
    )
    return _with_injection(program, arguments)


def _with_injection(program: Program, arguments: argparse.Namespace) -> Program:
    """``python -m phalanx.launch`` hands the local rank over as an argument, unless --use-env says otherwise."""
    if getattr(arguments, "use_env", True):
        return program
    if program.kind == "command":
        raise UsageError("--no-python needs --use-env: a program of any kind is not given --local_rank.")
    spelling = arguments.local_rank_spelling
    if spelling == "auto":
        file = program.target.replace(".", "/") + ".py" if program.kind == "module" else program.target
        spelling = _spelling_in(file)
    return messages.replace(program, inject_local_rank=f"--{spelling}")


def _spelling_in(script: str) -> str:
    """The spelling that the script's text has; the old one when it has both or neither."""
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:
        return "local_rank"
    return "local-rank" if "--local-rank" in text and "--local_rank" not in text else "local_rank"


def _nodes(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    try:
        numbers = [int(part) for part in text.split(":")]
        fewest, most = numbers if len(numbers) == 2 else (*numbers, *numbers)
    except ValueError:
        raise UsageError(f"--nnodes {text!r} is unknown; give N, or MIN:MAX.") from None
    return fewest, most


def _node_rank(arguments: argparse.Namespace, environ: Mapping[str, str], nodes: tuple[int, int]) -> int:
    """The flag, or the pod's number in an indexed Job of Kubernetes; the pods of such a Job may also be runs alone."""
    if arguments.node_rank is not None:
        return arguments.node_rank
    return (env.integer(environ, "JOB_COMPLETION_INDEX") if nodes[1] > 1 else None) or 0


def _meeting(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the rendezvous: where and how the nodes meet."""
    kind = arguments.rdzv_backend
    if kind not in _DEFAULT_PORT:
        raise UsageError(f"--rdzv-backend {kind} is not supported; use static or c10d.")
    settings = _conf(arguments.rdzv_conf)
    host, port = _place(arguments)
    return {
        "rdzv_backend": kind,
        "master_addr": host,
        "master_port": port,
        "rdzv_timeout": settings.get("join_timeout", settings.get("timeout", arguments.rdzv_timeout)),
        "last_call": settings.get("last_call_timeout", LAST_CALL),
        "is_host": bool(settings["is_host"]) if "is_host" in settings else None,
        "secret_file": arguments.secret_file,
    }


def _place(arguments: argparse.Namespace) -> tuple[str, int]:
    """Host and port, which is 0 for a free one. On one machine an endpoint's port means the same as --master-port."""
    endpoint, kind = arguments.rdzv_endpoint, arguments.rdzv_backend
    if arguments.standalone:
        return LOOPBACK, 0
    if not endpoint or (kind == "static" and arguments.master_port is not None):
        return arguments.master_addr or LOOPBACK, check_port(arguments.master_port or 0, "--master-port")
    parts = re.fullmatch(r"(?:\[(?P<v6>[^]]+)\]|(?P<host>[^:]+))(?::(?P<port>\d{1,9}))?", endpoint)
    if parts is None:
        raise UsageError(f"--rdzv-endpoint {endpoint!r} is not HOST or HOST:PORT; an IPv6 address needs brackets.")
    default = 0 if _nodes(arguments.nnodes)[1] == 1 else _DEFAULT_PORT[kind]
    port = int(parts["port"]) if parts["port"] else default
    return parts["v6"] or parts["host"], check_port(port, "the port of --rdzv-endpoint")


def _conf(text: str) -> dict[str, float]:
    """torchrun's ``join_timeout=60,last_call_timeout=5``, as far as there is a use for it."""
    settings: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in _CONF:
            raise UsageError(f"--rdzv-conf has {name!r}, which is not known; there are {', '.join(_CONF)}.")
        try:
            settings[name.strip()] = float({"true": "1", "false": "0"}.get(value.lower(), value))
        except ValueError:
            raise UsageError(f"--rdzv-conf {part} is not a number; give it like {name}=30.") from None
    return settings


def _signals(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not (name.startswith("SIG") and isinstance(getattr(signal, name, None), signal.Signals)):
            raise UsageError(f"--signals-to-handle has {name!r}, which is no signal; give names like SIGTERM,SIGUSR1.")
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle has {name}, which no process can handle; leave it out.")
    return names


def _check_local_ranks(flag: str, text: str, named: Iterable[int], known: int) -> None:
    for rank in named:
        if not 0 <= rank < known:
            raise UsageError(f"{flag} {text} names local rank {rank}, but they go from 0 to {known - 1}.")


def _streams(flag: str, text: str, nproc: int, known: int) -> dict[int, int]:
    """``3`` for all local ranks, or ``0:1,1:2`` for some."""
    try:
        if ":" not in text:
            streams = dict.fromkeys(range(nproc), int(text))
        else:
            streams = {int(rank): int(value) for rank, value in (part.split(":") for part in text.split(","))}
        if not all(0 <= value <= 3 for value in streams.values()):
            raise ValueError
    except ValueError:
        raise UsageError(f"{flag} {text!r} is unknown; give 0 to 3, or pairs like 0:1,1:2.") from None
    _check_local_ranks(flag, text, streams, known)
    return {rank: value for rank, value in streams.items() if value}


def _filter(text: str, known: int) -> tuple[int, ...] | None:
    try:
        ranks = tuple(int(part) for part in text.split(",")) if text else None
    except ValueError:
        raise UsageError(f"--local-ranks-filter {text!r} is not a list of numbers; give them like 0,1.") from None
    _check_local_ranks("--local-ranks-filter", text, ranks or (), known)
    return ranks


def _texts(text: str) -> tuple[str, ...]:
    """``a,b``; a comma within one is written twice, as for torchrun."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part)
