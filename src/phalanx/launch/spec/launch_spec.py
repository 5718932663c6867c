"""The specification of a run and of a worker: frozen records that cross process boundaries, and the ranks of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from phalanx.errors import UsageError
from phalanx.messages import Count, Rank, Record
from phalanx.system.ports import LOOPBACK

ProgramKind = Literal["script", "module", "path", "command", "function"]
START_METHODS = ("auto", "fork", "exec")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
LAST_CALL = 10.0
MOST_PROCESSES, MOST_NODES = 10_000, 100_000
"""The most processes of a node, and nodes of a run. More is a typing error, and would only fail later."""
_SHUTDOWN_TIMEOUT = 10.0
_MOST_SECONDS = 1e9
"""The kernel's own timers end a little later."""


def check_processes(count: int, source: str) -> int:
    """Returns ``count`` if one node can run so many; ``source`` names the flag or argument in the error."""
    if not 1 <= count <= MOST_PROCESSES:
        raise UsageError(f"{source} is {count}; a node runs 1 to {MOST_PROCESSES} processes.")
    return count


class Program(Record, frozen=True):
    """The program that every worker runs."""

    kind: ProgramKind
    """A module is run by -m, a path by --run-path, a command by --no-python, a function by spawn."""
    target: str
    args: tuple[str, ...] = ()
    inject_local_rank: str | None = None
    """The option that carries the local rank as first argument, such as ``--local_rank``; None for none."""
    interpreter: str | None = None
    """Another Python than the launcher's own; None for the same."""


class Host(Record, frozen=True):
    """One machine, and how many processes it gets."""

    name: str
    """The name as given, without user and brackets."""
    slots: int | None = None
    """The number of its processes; None for --nproc-per-node."""
    user: str | None = None
    gpus: str | None = None
    """The GPUs that srun is asked for, if SLURM would give the agent those of one task; None: all of the job's."""

    @property
    def target(self) -> str:
        """The host as ssh's argument."""
        return f"{self.user}@{self.name}" if self.user else self.name


class HostList(Record, frozen=True):
    """All machines of a run that one command starts; the first has node rank 0."""

    hosts: tuple[Host, ...]
    transport: Literal["ssh", "srun"] = "ssh"
    ssh: tuple[str, ...] = ("ssh",)
    export: tuple[str, ...] = ()
    """Variables that are forwarded, beside those of transports.py."""


class Placement(Record, frozen=True):
    """The numbers of one process among all; the names have torchrun's meaning."""

    rank: int
    local_rank: int
    node: int
    world_size: int
    local_world_size: int
    nnodes: int


class LaunchSpec(Record, frozen=True):
    """One run, as asked for on the command line. The same on every node but for ``node_rank``."""

    program: Program
    nproc_per_node: int = 1
    nnodes: tuple[int, int] = (1, 1)
    """Fewest and most nodes."""
    node_rank: int = 0
    master_addr: str = LOOPBACK
    master_port: int = 0
    """0 for a free one."""
    interface: str | None = None
    """The network to the other nodes; None for the one that leads to the master."""
    local_addr: str | None = None
    """This node's address on that network; None for its own."""
    rdzv_backend: str = "static"
    """``static``: nodes have numbers from the start; ``c10d``: they get them when they meet at the master's address."""
    rdzv_timeout: float = 300.0
    last_call: float = LAST_CALL
    """Seconds to wait for more nodes when the fewest that are needed have come."""
    is_host: bool | None = None
    """This node serves the c10d rendezvous; None: if the address is one of its own."""
    secret_file: str | None = None
    """The file with the secret of the run, if its nodes are started one by one."""
    run_id: str = "none"
    role: str = "default"
    max_restarts: int = 0
    start_method: str = "auto"
    preload: tuple[str, ...] = ()
    backend: str = "auto"
    """``auto``: a script that asks for gloo may get shm; ``as-written``: it may not."""
    shutdown_timeout: float | None = None
    """None: 10 seconds, or the time that a scheduler gives after its signal."""
    time_limit: float | None = None
    """Seconds; the ranks stop early enough to save before."""
    stopped_exit_code: int | None = None
    """After a stop by a signal or a limit; None: 128 and the signal."""
    requeue: bool = False
    """Put the SLURM job back into its queue after such a stop."""
    max_preemptions: int | None = None
    """Restarts after the loss of a node, which ``max_restarts`` does not count; None: no limit."""
    stall_after: float = 30.0
    """Seconds without progress of any rank until it is a stall; 0 for no limit."""
    on_stall: str = "wait"
    """``wait`` or ``kill``."""
    devices: tuple[str, ...] | None = None
    """The value of ``devices_variable``; None leaves it as it is."""
    devices_variable: str = "CUDA_VISIBLE_DEVICES"
    """The variable that shows a process some of the accelerators of this machine's kind."""
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    """One of `NUMA_BINDINGS`."""
    cpus: tuple[tuple[int, ...], ...] | None = None
    """The CPUs of each local rank, by ``numa_binding``; None for those of the launcher."""
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    log_dir: str = "runs"
    redirects: Mapping[int, int] = {}
    """Local rank to 1 (stdout), 2 (stderr) or 3: into files only."""
    tee: Mapping[int, int] = {}
    """The same, into files and onto the console."""
    local_ranks_filter: tuple[int, ...] | None = None
    duplicate_filters: Mapping[int, tuple[str, ...]] = {}
    """1 (stdout), 2 (stderr) to the texts; a line with one of them also goes to a file for all local ranks."""
    host_list: HostList | None = None
    """The hosts that this command starts; None when it starts this node alone."""
    node_name: str | None = None
    """This node's name in the output, when one command has started all nodes."""
    task: Placement | None = None
    """The task of srun that this agent is: the tasks of a step are the nodes of this run."""

    @property
    def task_place(self) -> Placement | None:
        """The place of the only rank here, if srun has started several tasks on a machine; else None."""
        return self.task if self.task is not None and self.task.world_size > self.task.nnodes else None

    @property
    def shares_console(self) -> bool:
        """The first task of srun prints for this one what all of them know."""
        return self.task is not None and self.task.rank > 0

    def __post_init__(self) -> None:
        fewest, most = self.nnodes
        if not 0 < fewest <= most:
            raise UsageError(f"--nnodes {fewest}:{most} is not a range; give N, or MIN:MAX with 1 <= MIN <= MAX.")
        if most > MOST_NODES:
            raise UsageError(f"--nnodes is {most}; a run has {MOST_NODES} nodes at most.")
        check_processes(self.nproc_per_node, "--nproc-per-node")
        if not 0 <= self.node_rank < most and self.rdzv_backend == "static":  # elsewhere it is ignored
            raise UsageError(f"--node-rank {self.node_rank} does not exist: {most} node(s) have 0 to {most - 1}.")
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts is {self.max_restarts}; give 0 or more.")
        if self.max_preemptions is not None and self.max_preemptions < 0:
            raise UsageError(f"--max-preemptions is {self.max_preemptions}; give 0 or more.")
        if self.stopped_exit_code is not None and not 0 <= self.stopped_exit_code <= 255:
            raise UsageError(f"--stopped-exit-code is {self.stopped_exit_code}; give 0 to 255.")
        self._check_seconds()
        if self.start_method not in START_METHODS:
            raise UsageError(f"--start-method {self.start_method} is unknown; give one of {', '.join(START_METHODS)}.")

    def stopped_code(self, number: int) -> int:
        """The exit code of a run that a signal has stopped."""
        return 128 + number if self.stopped_exit_code is None else self.stopped_exit_code

    @property
    def seconds_to_end(self) -> float:
        """Seconds from asking ranks to end to killing them."""
        return _SHUTDOWN_TIMEOUT if self.shutdown_timeout is None else self.shutdown_timeout

    def _check_seconds(self) -> None:
        for flag, seconds, allowed in (
            ("--shutdown-timeout", self.seconds_to_end, "0 or more"),
            ("--stall-after", self.stall_after, "or 0 to switch it off"),
            ("--rdzv-timeout", self.rdzv_timeout, "more than 0"),
            ("last_call_timeout of --rdzv-conf", self.last_call, "0 or more"),
        ):
            if not 0 <= seconds <= _MOST_SECONDS or (allowed == "more than 0" and not seconds):  # nan is not either
                raise UsageError(f"{flag} is {seconds:g}; give seconds, {allowed}.")


def placements(local_sizes: Sequence[int]) -> list[Placement]:
    """Returns every process of a run, node by node; ``local_sizes[n]`` is the number of processes of node n.

    Ranks are dense and ordered by node: node 0 has 0 … local_sizes[0]-1, node 1 continues from there.
    """
    world_size = sum(local_sizes)
    everyone: list[Placement] = []
    for node, local_size in enumerate(local_sizes):
        for local_rank in range(local_size):
            everyone.append(Placement(len(everyone), local_rank, node, world_size, local_size, len(local_sizes)))
    return everyone


class WorkerSpec(Record, frozen=True):
    """One process that the zygote starts."""

    rank: Rank
    local_rank: Rank
    program: Program
    environment: Mapping[str, str]
    """The whole environment."""
    start_method: str = "auto"
    cpus: tuple[Count, ...] | None = None
    """The CPUs that it may use; None for those of the zygote."""

    def argv(self) -> list[str]:
        """Returns sys.argv as the script sees it (for a module, Python fills in the file's path)."""
        option = self.program.inject_local_rank
        return [self.program.target, *([f"{option}={self.local_rank}"] if option else ()), *self.program.args]


def worker_environment(
    base: Mapping[str, str],
    spec: LaunchSpec,
    place: Placement,
    master: tuple[str, int],
    attempt: int,
    run: str,
    interfaces: Mapping[str, str] = {},
) -> dict[str, str]:
    """Returns the environment of one worker: the launcher's own, torchrun's variables, and those of a `Route`."""
    address, port = master
    place = spec.task_place or place
    environment = dict(base)
    environment |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nnodes),
        # One role a run, so a rank among its role is a rank among all.
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "ROLE_NAME": spec.role,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PHALANX_STORE": f"{address}:{port}",
        "PHALANX_BACKEND": spec.backend,
    }
    # torchrun does so too: a failed nccl collective ends its process instead of waiting for ever.
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if spec.devices is not None:
        environment[spec.devices_variable] = ",".join(spec.devices)
    if spec.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        if spec.devices:
            environment[spec.devices_variable] = spec.devices[place.local_rank % len(spec.devices)]
    parts = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if parts[0].startswith("MIG-"):  # of several parts of a GPU, CUDA shows a process only the first
        environment["CUDA_VISIBLE_DEVICES"] = parts[place.local_rank % len(parts)]
    for name, value in interfaces.items() if place.nnodes > 1 else ():
        environment.setdefault(name, value)
    if place.nnodes == 1:
        # On one node nothing needs to be reached from outside.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
