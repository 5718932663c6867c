"""The messages between the agent and its helpers, the zygote and the keeper."""

from __future__ import annotations

from typing import Annotated

from phalanx.launch.spec.launch_spec import WorkerSpec
from phalanx.messages import Count, ExitCode, Message, Meta, Name, Pid, Rank, Signal, Text


class Setup(Message, frozen=True):
    """The first message to a zygote."""

    start_method: Name
    preload: tuple[Name, ...]
    late: tuple[Name, ...]
    """Modules that the script probably imports; one that cannot be imported is left out."""
    script_directory: str | None
    token: Name
    with_nodes: bool
    """The keeper also talks to other nodes."""
    secret: Name | None
    die_with: Annotated[int, Meta(ge=0, lt=1 << 31)]
    """The process with which the zygote dies while it imports; 0 for none."""


class Start(Message, frozen=True):
    """Start a worker; its descriptors are sent with the message."""

    worker: WorkerSpec


class SendSignal(Message, frozen=True):
    pid: Pid
    signal: Signal


class Sweep(Message, frozen=True):
    """End whatever the workers have left behind."""


class StartKeeper(Message, frozen=True):
    """Start a keeper; its channel, and its socket if it has one, are sent with the message."""


Request = Start | SendSignal | Sweep | StartKeeper
"""From the agent to the zygote."""


class ImportFailed(Message, frozen=True):
    module: Name
    error: Text


class Ready(Message, frozen=True):
    """The zygote has imported what it should, and takes requests."""

    prefix: str


class CannotFork(Message, frozen=True):
    why: Text


class Started(Message, frozen=True):
    rank: Rank
    pid: Pid
    why_exec: Text | None
    """Why it was not forked; None when it was."""


class Exited(Message, frozen=True):
    rank: Rank
    pid: Pid
    exit_code: ExitCode | None
    signal: Signal | None
    memory: Count = 0
    """The most bytes that it had in memory, as the kernel reports them at its end."""


class Swept(Message, frozen=True):
    left: tuple[Pid, ...]
    """Processes that even SIGKILL has not ended."""


class KeeperStarted(Message, frozen=True):
    pid: Pid


class KeeperEnded(Message, frozen=True):
    pid: Pid
    exit_code: ExitCode
    """Negative: the signal that ended it."""


Event = ImportFailed | Ready | CannotFork | Started | Exited | Swept | KeeperStarted | KeeperEnded
"""From the zygote to the agent."""


class FreshStore(Message, frozen=True):
    """To the keeper: replace the store by a new, empty one. It answers with the same."""
