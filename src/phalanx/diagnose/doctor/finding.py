"""What a check is given, and what it returns."""

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
    from phalanx.system.cores import Cores

Verdict = Literal["ok", "warning", "error", "info"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what is there, and what to do about it."""

    name: str
    value: str
    verdict: Verdict = "ok"
    """``info`` is for what is neither good nor bad."""
    advice: str = ""
    """The command or setting that helps. A warning and an error have one."""


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
    cores: Cores
    omp_num_threads: str | None
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
        return self.asked_ranks or len(self.torch.gpus) or self.cores.usable


def judged(name: str, value: str, advice: str, *, error: bool = False, warning: bool = False) -> Finding:
    """A finding that has the advice only where something is wrong."""
    if not (error or warning):
        return Finding(name, value)
    return Finding(name, value, "error" if error else "warning", advice)


def having(there: Sequence[str], missing: Sequence[str]) -> str:
    """``ssh, mpirun; not srun``."""
    return (", ".join(there) or "none") + ("; not " if missing else "") + ", ".join(missing)


def counted(count: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'s' * (count != 1)}"


def container_setting(facts: Facts, flag: str, setting: str) -> str:
    """How more is given to a container: a flag of docker and podman, a setting of kubernetes."""
    if facts.container == "kubernetes":
        return f"in the pod's description {setting}"
    return f"{'podman' if facts.container == 'podman' else 'docker'} run {flag} …"
