"""The facts that a check of the doctor is given, and the finding that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from phalanx.diagnose.doctor.machine import Limits, Memory, Space
    from phalanx.diagnose.doctor.network import Clock, Network
    from phalanx.diagnose.doctor.software import Python
    from phalanx.diagnose.doctor.torch_build import SystemGpus
    from phalanx.diagnose.doctor.torch_probe import Torch
    from phalanx.system.cgroups import Cores

Verdict = Literal["ok", "warning", "error", "info"]
"""``info`` is for facts that are neither good nor bad."""
Judgement = tuple[str, Verdict, str]
"""The value that was found, the verdict on it, and for a warning or an error the command or setting that helps."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


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
    gpus: SystemGpus
    nvidia: dict[str, str]
    """The answers of nvidia-smi."""
    cores: Cores
    omp_num_threads: str | None
    memory: Memory
    shared_memory: Space | None
    """/dev/shm."""
    limits: Limits
    network: Network
    clock: Clock
    runs: Space
    """The file system of the run directories."""
    tools: dict[str, str | None]
    """The path of each program that phalanx or a user may call."""
    init: str | None = None
    """The command line of pid 1 in a container."""

    @property
    def ranks(self) -> int:
        """The number that was asked for, or that --nproc-per-node auto would take."""
        return self.asked_ranks or len(self.torch.gpus) or self.cores.usable


def on_the_host(facts: Facts) -> str:
    return " on the host" if facts.container else ""


def ok(value: str) -> Judgement:
    return value, "ok", ""


def info(value: str) -> Judgement:
    return value, "info", ""


def warning(value: str, advice: str, when: bool = True) -> Judgement:
    return (value, "warning", advice) if when else ok(value)


def error(value: str, advice: str, when: bool = True) -> Judgement:
    return (value, "error", advice) if when else ok(value)


def having(there: Sequence[str], missing: Sequence[str]) -> str:
    """``ssh, mpirun; not srun``."""
    return (", ".join(there) or "none") + ("; not " if missing else "") + ", ".join(missing)


def counted(count: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'s' * (count != 1)}"


def container_setting(facts: Facts, flag: str, setting: str) -> str:
    """The setting that gives more to a container: a flag of docker and podman, a setting of kubernetes."""
    if facts.container == "kubernetes":
        return f"in the pod's description {setting}"
    return f"{'podman' if facts.container == 'podman' else 'docker'} run {flag} …"
