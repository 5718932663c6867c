"""The files of a run directory: their names, and the records in them.

    runs/<id>/                 mode 0700: it holds the environment's values and whatever the script printed
      run.json                 a RunFile, written before anything starts
      agent.events.jsonl       one line an event of the agent: started, exited, stall, straggler, restarting, ended;
                               trouble: something was not watched; ignored, malformed: input that is no message
      rank-N.events.jsonl      the events of rank N: progress once a second and each epoch (px.track); saving, loaded,
                               saved, save failed (px.Checkpointer); feature off, for a name that this torch has not
      rank-N.status            the state of rank N: a page of memory, see phalanx/status
      rank-N.stacks            the stacks of rank N's threads, each time that they were asked for
      stall-N.txt              the Nth verdict on ranks without progress, with all that was known of each
      rank-N.log               everything that rank N printed, and the traceback it died with
      keeper.log               with several nodes: torch's messages about the connections between them
      nccl.PID.log             the warnings of NCCL in a process of a rank, on a machine with GPUs
      nccl_trace_rank_N        torch's last collectives of rank N, if NCCL has timed out: a pickle
      error-N.json             an ErrorRecord: the exception that ended rank N's script
      report.json              a ReportFile: how the run ended

The files are the only interface between a run and the commands that report on it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from phalanx import messages, run_files
from phalanx.messages import Count, ExitCode, Pid, Rank, Record, Seconds, Signal, Text

RUN_FILE, REPORT_FILE, AGENT_EVENTS, KEEPER_LOG = "run.json", "report.json", "agent.events.jsonl", "keeper.log"
NCCL_LOG, FLIGHT_TRACE = "nccl.{}.log", "nccl_trace_rank_"
"""For a pid; torch appends the rank."""


# ---- how a rank ended


class Frame(Record, frozen=True):
    """One line of a traceback."""

    file: str
    line: Count
    function: str
    source: Text


class NativeFrame(Record, frozen=True):
    """One call of native code."""

    library: str
    symbol: str
    """The name with the offset, as in ``gloo_send+0x1f``; the offset alone where the name is not known."""


class ErrorRecord(Record, frozen=True):
    """The exception that ended a rank's script, as the rank itself saw it."""

    rank: Rank
    pid: Pid
    time: Seconds
    """Seconds since the epoch when the exception left the script."""
    type: Text
    """Qualified name of the exception's class, without ``builtins.``"""
    message: Text
    frames: tuple[Frame, ...]
    """Outermost first; only the script's side of the call stack."""
    traceback: Text
    exit_code: ExitCode
    note: Text = ""
    """Facts that the rank knows beyond the message, in a sentence or two."""


class ThreadDeath(Record, frozen=True):
    """An exception has ended a thread beside the main one, which may wait for it since."""

    name: Text
    error: Text
    """Type and message, in a line."""
    place: Text
    """The user's line, as ``file:line``; empty if it was in none."""


class OutOfMemory(Record, frozen=True):
    """The kernel has killed a process because memory had run out."""

    pid: Pid
    """The rank, or a process that it had started."""
    used: Count | None
    """Bytes that this process had in memory, as far as it was seen."""
    limit: Count
    """Bytes that the control group, or the whole machine, has."""
    group: str
    """The control group whose limit was reached; empty when it was the machine's own memory."""


class DeviceError(Record, frozen=True):
    """An error of an accelerator, or of a library that communicates between them, such as NCCL."""

    headline: Text
    is_consequence: bool = False
    """Another rank is the cause."""
    advice: Text = ""
    """How to find the line of an error that is noticed late."""
    awaited: tuple[Text, Count] = "", 0
    """The collective that did not end in time, such as ``all_reduce``, and its number in its group."""
    waited: Seconds = 0.0
    """The seconds that it was waited for."""


class SharedMemory(Record, frozen=True):
    """How full /dev/shm was, in bytes."""

    total: Count
    used: Count


class Ending(Record, frozen=True):
    """How one rank of one attempt ended."""

    rank: Rank
    pid: Count
    """0: it had not started."""
    time: Seconds
    """When it failed or ended, seconds since the epoch: the exception's time if there was one."""
    exit_code: ExitCode | None = None
    signal: Signal | None = None
    asked: bool = False
    """The agent had told it to stop before it ended."""
    error: ErrorRecord | None = None
    tail: tuple[Text, ...] = ()
    """The last lines it printed."""
    host: str = ""
    """The name of its node."""
    crash: tuple[Frame, ...] = ()
    """The Python stack when native code crashed, innermost first, if the rank could still write it."""
    native: tuple[NativeFrame, ...] = ()
    """The native stack then, innermost first, if Python is new enough (3.14)."""
    device_error: DeviceError | None = None
    """The error of its device that ended it."""
    called: Frame | None = None
    """The line that called the collective in which it failed or was stopped, if it was in one."""
    groups: tuple[tuple[Text, Count, Count], ...] = ()
    """Its process groups, each with the numbers of the last collective that it has enqueued and completed."""
    memory: Count | None = None
    """The most bytes that it was seen to have in memory."""
    out_of_memory: OutOfMemory | None = None
    """Set when the kernel has killed it, or a process that it needed, because memory had run out."""
    shared_memory: SharedMemory | None = None
    """/dev/shm at its end, when that may be the reason."""
    evidence: tuple[Text, ...] = ()
    """What its GPU's driver and NCCL know of its end, in sentences."""
    updates: Count = 0
    """Optimizer steps that it had made in this attempt."""
    progress: tuple[Count, Count, Count] = (0, 0, 0)
    """The step of its last checkpoint, its epoch, and its step in that, as far as px.Checkpointer and px.track know."""

    @property
    def failed(self) -> bool:
        return self.error is not None or self.signal is not None or bool(self.exit_code)

    @property
    def status(self) -> int:
        """The exit status as a shell gives it: 128 + signal, or the exit code.

        The launcher may have stopped a rank that had failed by itself, if it learned of another failure first.
        """
        has_failed = self.error is not None or self.device_error is not None
        was_stopped = has_failed and self.signal in (signal.SIGTERM, signal.SIGKILL)
        if self.signal is not None and not was_stopped:
            return 128 + self.signal
        if self.error is not None:
            return self.error.exit_code or 1
        return self.exit_code or int(has_failed)


# ---- the run


class RunFile(Record, frozen=True):
    """run.json: what was started, and where."""

    host: str
    started: Seconds
    run_id: str = ""
    command: tuple[str, ...] = ()
    directory: str = ""
    executable: str = ""
    prefix: str = ""
    spec: object = None
    """The LaunchSpec, for people."""


class HangRecord(Record, frozen=True):
    """The verdict on ranks that make no progress."""

    headline: Text
    kind: str = ""
    ranks: tuple[Rank, ...] = ()
    lines: tuple[Text, ...] = ()
    """The lines on the console."""


class Elsewhere(Record, frozen=True):
    """Ranks that called another collective than the cause."""

    called: Frame
    ranks: tuple[Rank, ...]


class Failure(Record, frozen=True):
    """Why an attempt failed."""

    cause: Ending | None = None
    """The rank that is the cause, if it is one."""
    hang: HangRecord | None = None
    """The verdict, if the ranks were ended because they made no progress."""
    alike: tuple[Rank, ...] = ()
    victims: tuple[Rank, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()


class Restart(Failure, frozen=True, kw_only=True):
    """Why another attempt was begun."""

    attempt: Count
    """The number of the next one."""
    time: Seconds
    reason: Text


class NodeRanks(Record, frozen=True):
    directory: str
    ranks: tuple[Rank, ...]


class StopRecord(Record, frozen=True):
    """The stop of a run that had not failed, and the ranks that were killed or failed while they stopped."""

    by: Text
    step: Count | None = None
    """The optimizer steps after which all ranks stopped, if they had agreed on one."""
    saved: Mapping[Rank, Count] = {}
    """The step of the last checkpoint that each rank has seen whole, as far as px.Checkpointer knows."""
    killed: tuple[Rank, ...] = ()
    failed: tuple[Rank, ...] = ()


class ReportFile(Failure, frozen=True, kw_only=True):
    """report.json: how the run ended."""

    exit_code: ExitCode
    seconds: Seconds
    attempts: Count = 1
    started: Seconds = 0.0
    said: tuple[Text, ...] = ()
    """The last lines on the console."""
    restarts: tuple[Restart, ...] = ()
    nodes: Mapping[str, NodeRanks] = {}
    """The nodes by host."""
    stop: StopRecord | None = None
    stragglers: tuple[Mapping[str, object], ...] = ()
    """Each has ``said``, the line on the console, and what was measured."""
    ranks: tuple[Ending, ...] = ()


# ---- writing


def error_path(run_directory: Path, rank: int) -> Path:
    return run_directory / f"error-{rank}.json"


def log_path(run_directory: Path, rank: int) -> Path:
    return run_directory / f"rank-{rank}.log"


def rank_events_path(run_directory: Path, rank: int) -> Path:
    return run_directory / f"rank-{rank}.events.jsonl"


def write_record(path: Path, record: object) -> None:
    """Writes JSON that people can read too; whole or not at all."""
    run_files.write_whole(path, messages.indented(record) + "\n")
