"""The command line of ``phalanx run`` and ``python -m phalanx.launch``: torchrun's flags, into a LaunchSpec.

Both spellings of every flag are taken (``--nproc-per-node``, ``--nproc_per_node``), and ``PET_NPROC_PER_NODE`` gives
a default, as for torchrun.
"""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.env import PET_PREFIX
from phalanx.errors import UsageError
from phalanx.launch import devices
from phalanx.launch.spec import LaunchSpec, Program
from phalanx.ports import LOOPBACK, check_port

_NOT_SUPPORTED = {
    "--numa-binding": "bind with numactl and --no-python instead",
    "--logs-specs": "the run directory has a log for each rank",
    "--event-log-handler": "read agent.events.jsonl in the run directory",
    "--duplicate-stdout-filters": "filter rank-N.log in the run directory",
    "--duplicate-stderr-filters": "filter rank-N.log in the run directory",
}

_EXAMPLES = """\
examples:
  phalanx run --nproc-per-node 4 train.py --lr 0.1      four processes on this machine
  phalanx run --nproc-per-node auto train.py            one for each card, or for each core
  phalanx run --devices 0,3 train.py                    one on card 0, one on card 3
  phalanx run --nproc-per-node 2 -m my.package          as `python -m` would run it
  phalanx run --nnodes 3 --nproc-per-node 8 --dry-run train.py
"""


class _Parser(argparse.ArgumentParser):
    """argparse that takes both spellings, reads PET_ variables and says its errors as phalanx does."""

    def __init__(self, environ: Mapping[str, str], **kwargs) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self._environ = environ

    def flag(self, group: argparse._ArgumentGroup, *names: str, **kwargs) -> None:
        long = next(name for name in names if name.startswith("--"))
        variable = PET_PREFIX + long[2:].replace("-", "_").upper()
        value = self._environ.get(variable)
        if value is not None:
            kwargs["default"] = value == "1" if kwargs.get("action") == "store_true" else value
        added = group.add_argument(*names, **kwargs)
        if "-" in long[2:]:
            # The second spelling works and stays out of --help, which is long enough.
            self._option_string_actions["--" + long[2:].replace("-", "_")] = added
            added.option_strings = [*added.option_strings]

    def error(self, message: str):
        for flag, instead in _NOT_SUPPORTED.items():
            if flag in message.replace("_", "-"):
                raise UsageError(f"torchrun's {flag} is not supported; {instead}.")
        raise UsageError(f"{message}. `{self.prog} --help` lists the flags.")


def new_parser(environ: Mapping[str, str], prog: str = "phalanx run") -> _Parser:
    """The flags, in the order a person would look for them."""
    parser = _Parser(
        environ,
        prog=prog,
        usage=f"{prog} [flags] script.py [its arguments]",
        description="Starts a training script in several processes and stays until they have ended.",
        epilog=_EXAMPLES,
    )
    size = parser.add_argument_group("how many processes")
    parser.flag(size, "--nproc-per-node", default=None, metavar="N", help="processes on each machine: a number, auto, cpu or gpu (default 1, or one for each of --devices)")
    parser.flag(size, "--nnodes", default="1", metavar="N|MIN:MAX", help="machines (default 1)")
    parser.flag(size, "--node-rank", type=int, default=0, metavar="K", help="number of this machine (default 0)")
    parser.flag(size, "--devices", default=None, metavar="0,3", help="the cards to use, counted within what is visible")
    parser.flag(size, "--virtual-local-rank", action="store_true", help="every process sees its card as number 0, and LOCAL_RANK=0")
    parser.flag(size, "--role", default="default", help="ROLE_NAME for the workers")

    what = parser.add_argument_group("what to run")
    parser.flag(what, "-m", "--module", action="store_true", help="the script is a module's name, as for python -m")
    parser.flag(what, "--no-python", action="store_true", help="the script is a program of any kind")
    parser.flag(what, "--run-path", action="store_true", help="run it with runpy.run_path; needs an absolute path")

    start = parser.add_argument_group("how to start")
    parser.flag(start, "--start-method", default="auto", metavar="HOW", help="fork (torch is imported once for all), exec (each imports it), auto (fork wherever that is safe; the default)")
    parser.flag(start, "--preload", default="", metavar="A,B", help="modules of yours to import once for all, before the fork")
    parser.flag(start, "--dry-run", action="store_true", help="print the table of processes and start nothing")

    meet = parser.add_argument_group("where they meet")
    parser.flag(meet, "--master-addr", default=LOOPBACK, metavar="HOST", help="host of rank 0 (several machines)")
    parser.flag(meet, "--master-port", default=None, type=int, metavar="P", help="port of the store (default: a free one)")
    parser.flag(meet, "--standalone", action="store_true", help="one machine, a free port: the default anyway")
    parser.flag(meet, "--rdzv-backend", default="static", help="static or c10d")
    parser.flag(meet, "--rdzv-endpoint", default="", metavar="HOST[:PORT]", help="where the machines meet")
    parser.flag(meet, "--rdzv-id", default="none", help="name of the run among others at the same endpoint")
    parser.flag(meet, "--rdzv-conf", default="", metavar="K=V,…", help="further settings of the meeting")
    parser.flag(meet, "--local-addr", default=None, help="address of this machine (several machines)")

    faults = parser.add_argument_group("when something goes wrong")
    parser.flag(faults, "--max-restarts", type=int, default=0, metavar="N", help="start all ranks again after a failure, at most N times")
    parser.flag(faults, "--shutdown-timeout", type=float, default=10.0, metavar="S", help="seconds between asking the ranks to end and killing them (default 10)")
    parser.flag(faults, "--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", metavar="A,B", help="signals that are passed on to the ranks and end the run")
    parser.flag(faults, "--monitor-interval", type=float, default=0.1, metavar="S", help="taken for torchrun's sake: faults are noticed at once")

    logs = parser.add_argument_group("output")
    parser.flag(logs, "--log-dir", default="runs", metavar="DIR", help="where run directories go (default runs); each has rank-N.log")
    parser.flag(logs, "-r", "--redirects", default="0", metavar="3|0:1,1:2", help="stdout (1), stderr (2) or both (3) only into files, for all or for some local ranks")
    parser.flag(logs, "-t", "--tee", default="0", metavar="3|0:1,1:2", help="the same, into files and onto the console")
    parser.flag(logs, "--local-ranks-filter", default="", metavar="0,1", help="local ranks that are shown on the console")

    parser.add_argument("training_script", metavar="script", help="the script, module or program")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="arguments", help="its arguments")
    return parser


def to_spec(arguments: argparse.Namespace, environ: Mapping[str, str]) -> LaunchSpec:
    """Checks every value; an error names the flag and what it got."""
    cards = devices.choose_cards(arguments.devices, environ) if arguments.devices else None
    visible = cards if cards is not None else devices.visible_cards(environ)
    asked = arguments.nproc_per_node or (str(len(cards)) if cards else "1")
    virtual = bool(arguments.virtual_local_rank)
    nproc = devices.process_count(asked, visible)
    return LaunchSpec(
        program=_program(arguments, environ),
        nproc_per_node=nproc,
        nnodes=_nodes(arguments.nnodes),
        node_rank=arguments.node_rank,
        master_addr=arguments.master_addr,
        master_port=_port(arguments),
        run_id=arguments.rdzv_id,
        role=arguments.role,
        max_restarts=arguments.max_restarts,
        start_method=_start_method(arguments.start_method),
        preload=tuple(name for name in arguments.preload.split(",") if name),
        shutdown_timeout=arguments.shutdown_timeout,
        devices=visible if virtual and visible else cards,
        virtual_local_rank=virtual,
        signals=_signals(arguments.signals_to_handle),
        log_dir=arguments.log_dir,
        redirects=_streams("--redirects", arguments.redirects, nproc),
        tee=_streams("--tee", arguments.tee, nproc),
        local_ranks_filter=_filter(arguments.local_ranks_filter),
    )


def _program(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Program:
    kinds = [kind for kind, on in (("path", arguments.run_path), ("command", arguments.no_python), ("module", arguments.module)) if on]
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
    import dataclasses

    if getattr(arguments, "use_env", True):
        return program
    if program.kind == "command":
        raise UsageError("--no-python needs --use-env: a program of any kind is not given --local_rank.")
    spelling = arguments.local_rank_spelling
    if spelling == "auto":
        spelling = _spelling_in(program.target)
    return dataclasses.replace(program, inject_local_rank=f"--{spelling}")


def _spelling_in(script: str) -> str:
    """The spelling that the script's text has; the old one when it has both or neither."""
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:
        return "local_rank"
    return "local-rank" if "--local-rank" in text and "--local_rank" not in text else "local_rank"


def _nodes(text: str) -> tuple[int, int]:
    try:
        numbers = [int(part) for part in text.split(":")]
        fewest, most = numbers if len(numbers) == 2 else (*numbers, *numbers)
    except ValueError:
        raise UsageError(f"--nnodes {text!r} is unknown; give N, or MIN:MAX.") from None
    return fewest, most


def _port(arguments: argparse.Namespace) -> int:
    """The store's port: 0 for a free one. On one machine an endpoint's port means the same as --master-port."""
    if arguments.rdzv_backend not in ("static", "c10d"):
        raise UsageError(f"--rdzv-backend {arguments.rdzv_backend} is not supported; use static or c10d.")
    if arguments.standalone:
        return 0
    port = re.search(r":(\d+)$", arguments.rdzv_endpoint)
    if port and not (arguments.rdzv_backend == "static" and arguments.master_port is not None):
        return check_port(int(port[1]), "the port of --rdzv-endpoint")
    return check_port(arguments.master_port or 0, "--master-port")


def _start_method(text: str) -> str:
    """torchrun's own values are taken for what they mean."""
    return {"spawn": "exec", "forkserver": "fork"}.get(text, text)


def _signals(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not (name.startswith("SIG") and isinstance(getattr(signal, name, None), signal.Signals)):
            raise UsageError(f"--signals-to-handle has {name!r}, which is no signal; give names like SIGTERM,SIGUSR1.")
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle has {name}, which no process can handle; leave it out.")
    return names


def _streams(flag: str, text: str, nproc: int) -> dict[int, int]:
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
    return {rank: value for rank, value in streams.items() if value}


def _filter(text: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in text.split(",")) if text else None
    except ValueError:
        raise UsageError(f"--local-ranks-filter {text!r} is not a list of numbers; give them like 0,1.") from None


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[LaunchSpec, bool]:
    """The spec, and whether this is a --dry-run."""
    arguments = new_parser(environ).parse_args(argv)
    return to_spec(arguments, environ), bool(arguments.dry_run)


def parse_launch(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[LaunchSpec, bool]:
    """The same for ``python -m phalanx.launch``, which has torch.distributed.launch's flags as well."""
    parser = new_parser(environ, prog="python -m phalanx.launch")
    group = parser.add_argument_group("torch.distributed.launch")
    parser.flag(group, "--use-env", action="store_true", help="hand the local rank over in LOCAL_RANK only")
    parser.flag(group, "--local-rank-spelling", default="auto", choices=["auto", "local_rank", "local-rank"], help="the argument that carries it (default: the one the script's text has)")
    arguments = parser.parse_args(argv)
    return to_spec(arguments, environ), bool(arguments.dry_run)
