"""What the doctor knows of a machine: frozen records, so that a check can be given the facts of any other."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Python:
    """The interpreter that runs phalanx, and so the ranks."""

    version: tuple[int, int, int]
    executable: str
    prefix: str
    base_prefix: str
    is_conda: bool
    active: str | None
    """The environment that the shell has activated, by VIRTUAL_ENV or CONDA_PREFIX."""
    command: str | None
    """The `phalanx` on PATH."""
    command_python: str | None
    """The interpreter that it starts, if it says."""
    command_is_ours: bool | None
    """Whether that one is ``executable``; None when it does not say."""


@dataclass(frozen=True)
class Card:
    name: str
    bytes: int


@dataclass(frozen=True)
class Torch:
    """What a process of its own found when it imported torch; it prints these fields as JSON."""

    version: str | None = None
    file: str | None = None
    """From where it was, or would be, imported."""
    problem: str | None = None
    """Why it cannot be imported or used."""
    is_missing: bool = False
    seconds: float = 0.0
    """What importing it took."""
    numpy: str | None = None
    numpy_problem: str | None = None
    backends: tuple[str, ...] = ()
    """Of gloo, nccl and mpi, those that it was built with."""
    cuda: str | None = None
    """The version of CUDA or ROCm that it was built for."""
    cuda_problem: str | None = None
    cards: tuple[Card, ...] = ()
    accelerator: str | None = None
    """Another kind of device, such as xpu."""
    library: str | None = None
    """Version and instructions of phalanx's C library."""
    library_problem: str | None = None


@dataclass(frozen=True)
class Cards:
    """What the system shows of graphics cards, whatever torch makes of it."""

    driver: str | None
    nodes: int
    """Device files, one a card."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class Cores:
    present: int
    allowed: int
    """By this process's affinity."""
    quota: float | None
    """By the container; in cores."""
    omp_num_threads: str | None

    @property
    def usable(self) -> int:
        """As `phalanx run` counts them."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota)))


@dataclass(frozen=True)
class Memory:
    """In bytes."""

    total: int
    available: int
    limit: int | None
    """By the container."""
    used_of_limit: int
    swap: int

    @property
    def left(self) -> int:
        return self.available if self.limit is None else min(self.available, self.limit - self.used_of_limit)


@dataclass(frozen=True)
class Space:
    """A file system, in bytes."""

    path: str
    total: int
    free: int
    is_writable: bool = True


@dataclass(frozen=True)
class Limits:
    """None means that there is none."""

    files_soft: int | None
    files_hard: int | None
    processes: int | None
    processes_used: int
    processes_by_container: bool
    """Whose limit ``processes`` is: the container's, or the user's."""


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    is_up: bool


@dataclass(frozen=True)
class Network:
    host: str
    resolved: tuple[str, ...]
    """Addresses that the host's name stands for."""
    resolve_problem: str | None
    interfaces: tuple[Interface, ...]
    gloo_interface: str | None
    """GLOO_SOCKET_IFNAME."""
    ports: dict[int, str | None] = field(default_factory=dict)
    """Who holds each; None when it is free."""


@dataclass(frozen=True)
class Clock:
    is_synchronised: bool | None
    """By the kernel's flag; None when it does not tell."""
    largest_error: float | None
    """Seconds, as the kernel estimates it."""


@dataclass(frozen=True)
class Facts:
    """Everything about one machine."""

    platform: str
    kernel: str
    container: str | None
    """docker, podman, kubernetes."""
    asked_ranks: int | None
    """--nproc-per-node."""
    python: Python
    torch: Torch
    cards: Cards
    cores: Cores
    memory: Memory
    shared_memory: Space | None
    """/dev/shm."""
    limits: Limits
    network: Network
    clock: Clock
    runs: Space
    """Where run directories go."""
    tools: dict[str, str | None]
    """Where each program is that phalanx or a user may call."""

    @property
    def ranks(self) -> int:
        """What was asked for, or what --nproc-per-node auto would take."""
        return self.asked_ranks or len(self.torch.cards) or self.cores.usable
