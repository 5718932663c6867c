"""The flags of ``phalanx run``, as a table: torchrun's own, and the few that are ours.

Both spellings of every flag are taken (``--nproc-per-node``, ``--nproc_per_node``), and ``PET_NPROC_PER_NODE`` gives
a default, as for torchrun.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from phalanx import argparser
from phalanx.env import BACKEND_CHOICES, PET_PREFIX
from phalanx.errors import UsageError
from phalanx.launch.spec.launch_spec import NUMA_BINDINGS


class Flag(NamedTuple):
    """One flag; without a ``metavar`` it is a switch."""

    name: str
    help: str
    metavar: str | None = None
    default: str | float | None = None
    type: Callable[[str], object] = str
    short: str | None = None
    choices: tuple[str, ...] | None = None

    @property
    def variable(self) -> str:
        return PET_PREFIX + self.name[2:].replace("-", "_").upper()


ON_STALL = ("wait", "kill")
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_EVERY = "stdout (1), stderr (2) or both (3)"

TABLE: dict[str, tuple[Flag, ...]] = {
    "how many processes": (
        Flag("--nproc-per-node", "on each machine: a number, auto, cpu or gpu (default 1, or one per device)", "N"),
        Flag("--nnodes", "machines (default 1)", "N|MIN:MAX"),
        Flag("--node-rank", "number of this machine (default: JOB_COMPLETION_INDEX, or 0)", "K", None, int),
        Flag("--devices", "the GPUs to use, counted among the visible ones", "0,3"),
        Flag(
            "--numa-binding",
            "bind each process to CPUs near its GPU, or spread them over the NUMA nodes: " + ", ".join(NUMA_BINDINGS),
            "HOW",
            choices=NUMA_BINDINGS,
        ),
        Flag("--virtual-local-rank", "every process sees its GPU as number 0, and LOCAL_RANK=0"),
        Flag("--role", "ROLE_NAME for the workers", "NAME", "default"),
    ),
    "what to run": (
        Flag("--module", "the script is a module's name, as for python -m", short="-m"),
        Flag("--no-python", "the script is a program of any kind"),
        Flag("--run-path", "run it with runpy.run_path; needs an absolute path"),
    ),
    "how to start": (
        Flag("--start-method", "fork: torch is imported once for all; exec: by each; auto (default)", "HOW", "auto"),
        Flag("--preload", "your modules to import once for all ranks, before the fork", "A,B", ""),
        Flag(
            "--backend",
            "auto (default): on CPUs shm instead of gloo; as-written: what the script asks for",
            "HOW",
            choices=BACKEND_CHOICES,
        ),
        Flag("--dry-run", "print the table of processes and start nothing"),
    ),
    "where they meet": (
        Flag("--master-addr", "host of rank 0, for several machines", "HOST"),
        Flag("--master-port", "port of the store (default: a free one)", "PORT", None, int),
        Flag("--standalone", "one machine and a free port, which is the default"),
        Flag("--rdzv-backend", "static: machines have numbers; c10d: they meet at an endpoint", "KIND", "static"),
        Flag("--rdzv-endpoint", "for c10d, where they meet: one machine's address (port 29400)", "HOST[:PORT]", ""),
        Flag("--rdzv-id", "name of the run; all machines give the same", "NAME", "none"),
        Flag("--rdzv-conf", "join_timeout, last_call_timeout (10 s for more than MIN), is_host", "K=V,…", ""),
        Flag("--rdzv-timeout", "seconds to wait for the other machines (default 300)", "S", 300.0, float),
        Flag("--interface", "the network to the other machines (default: the one that leads to the master)", "NAME"),
        Flag("--local-addr", "address of this machine, for several machines", "HOST"),
        Flag("--secret-file", "the secret by which the machines authenticate each other", "FILE"),
    ),
    "one command for all machines": (
        Flag("--hosts", "start there over ssh: host or host:processes; the first has rank 0", "A:8,B:8", short="-H"),
        Flag("--hostfile", "the same from a file with one host per line: name slots=8", "FILE"),
        Flag("--ssh", "the command that connects (default ssh)", "'ssh -p 22'", "ssh"),
        Flag("--export", "more environment variables to send there", "NAME,…", ""),
    ),
    "when something goes wrong": (
        Flag("--max-restarts", "start all ranks again after a failure, at most N times", "N", 0, int),
        Flag(
            "--shutdown-timeout",
            "seconds from asking ranks to end to killing them (default 10; the scheduler's)",
            "S",
            None,
            float,
        ),
        Flag("--time-limit", "stop the ranks so that they can save before this time is over: 3h50m", "TIME"),
        Flag(
            "--stopped-exit-code", "exit code after a stop by a signal or limit (default 128 + signal)", "N", None, int
        ),
        Flag("--requeue", "after such a stop, put the SLURM job back into the queue"),
        Flag("--max-preemptions", "restarts after the loss of a node, at most (default: no limit)", "N", None, int),
        Flag("--stall-after", "report why after S seconds without progress (default 30; 0: never)", "S", 30.0, float),
        Flag(
            "--on-stall",
            "then wait (default), or kill: end the ranks as after a failure",
            "HOW",
            "wait",
            choices=ON_STALL,
        ),
        Flag("--signals-to-handle", "signals that are passed on and end the run", "A,B", _SIGNALS),
        Flag("--monitor-interval", "accepted, without effect: faults are noticed at once", "S", 0.1, float),
    ),
    "output": (
        Flag("--log-dir", "where run directories go (default runs); each has rank-N.log", "DIR", "runs"),
        Flag("--redirects", f"{_EVERY} into files only, for all or some local ranks", "3|0:1,1:2", "0", short="-r"),
        Flag("--tee", "the same, into files and onto the console", "3|0:1,1:2", "0", short="-t"),
        Flag("--local-ranks-filter", "local ranks that are shown on the console", "0,1", ""),
        Flag("--duplicate-stdout-filters", "lines with one of these texts also go to filtered_stdout.log", "A,B", ""),
        Flag("--duplicate-stderr-filters", "the same of standard error, to filtered_stderr.log", "A,B", ""),
    ),
}

LAUNCH_TABLE: dict[str, tuple[Flag, ...]] = {
    "torch.distributed.launch": (
        Flag("--use-env", "pass the local rank in LOCAL_RANK only, not as an argument"),
        Flag(
            "--local-rank-spelling",
            "the argument that carries it (default auto: the one in the script's text)",
            "HOW",
            "auto",
            choices=("auto", "local_rank", "local-rank"),
        ),
    ),
}

NOT_SUPPORTED = {
    "--logs-specs": "the run directory has a log for each rank",
    "--event-log-handler": "read agent.events.jsonl in the run directory",
}

_EXAMPLES = """\
examples:
  phalanx run --nproc-per-node 4 train.py --lr 0.1      four processes on this machine
  phalanx run --nproc-per-node auto train.py            one for each GPU, or for each core
  phalanx run --devices 0,3 train.py                    one on GPU 0, one on GPU 3
  phalanx run --nproc-per-node 2 -m my.package          as `python -m` would run it
  phalanx run --nnodes 3 --nproc-per-node 8 --dry-run train.py
  phalanx run -H node1:8,node2:8 train.py               eight on each of two machines, over ssh
"""


class Parser(argparser.Parser):
    """Also explains flags of torchrun and of other launchers that are not supported."""

    habits = dict.fromkeys(("-n", "-np", "--num-processes", "--num_processes"), "--nproc-per-node")

    def error(self, message: str) -> NoReturn:
        for flag, instead in NOT_SUPPORTED.items():
            if flag in message.replace("_", "-"):
                raise UsageError(f"torchrun's {flag} is not supported; {instead}.")
        super().error(message.removesuffix(", arguments"))  # argparse demands them, and takes none for an answer


def new_parser(tables: Mapping[str, tuple[Flag, ...]], environ: Mapping[str, str], prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        usage=f"{prog} [flags] script.py [its arguments]",
        description="Starts a training script in several processes and waits until they have ended.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, flags in tables.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(parser, group, flag, _from_environment(flag, environ))
    parser.add_argument("training_script", metavar="script", help="the script, module or program")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="arguments", help="its arguments")
    return parser


def _from_environment(flag: Flag, environ: Mapping[str, str]) -> str | bool | None:
    """The default in the flag's variable. It is checked here: argparse does not compare defaults with the choices."""
    text = environ.get(flag.variable) or None
    if text is None:
        return None
    if flag.metavar is None:
        if text not in ("0", "1"):
            raise UsageError(f"{flag.variable}={text!r} is neither on nor off; set it to 1 or 0.")
        return text == "1"
    if flag.choices is not None and text not in flag.choices:
        raise UsageError(f"{flag.variable}={text!r} is unknown; set it to one of {', '.join(flag.choices)}.")
    try:
        flag.type(text)
    except ValueError:  # argparse would name the flag, which nobody has typed
        raise UsageError(f"{flag.variable}={text!r} is no number; set it to one, as for {flag.name}.") from None
    return text


def _add(parser: Parser, group: argparse._ArgumentGroup, flag: Flag, from_environment: str | bool | None) -> None:
    names = [flag.short, flag.name] if flag.short else [flag.name]
    if flag.metavar is None:
        added = group.add_argument(*names, help=flag.help, action="store_true", default=bool(from_environment))
    else:
        default = flag.default if from_environment is None else from_environment
        added = group.add_argument(
            *names, help=flag.help, metavar=flag.metavar, default=default, type=flag.type, choices=flag.choices
        )
    # The second spelling works and stays out of --help, which is long enough.
    parser._option_string_actions["--" + flag.name[2:].replace("-", "_")] = added
