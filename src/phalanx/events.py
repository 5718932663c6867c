"""What a run writes about itself: the run directory, its files and their shapes.

    runs/<id>/                 mode 0700: it holds the environment's values and whatever the script printed
      run.json                 the LaunchSpec, written before anything starts
      agent.events.jsonl       one line an event of the agent: started, exited, stall, straggler, restarting, ended, and
                               trouble: something was not watched; ignored, malformed: what is no message, no report
      rank-N.events.jsonl      what rank N's `px.track` saw: progress once a second, and each epoch; of px.Checkpointer
                               saving and loaded, and from the rank that was done last saved or save failed, each with
                               the step and the seconds; and feature off, for a name that this torch does not have
      rank-N.status            what rank N is doing now: a page of memory, see phalanx/status
      rank-N.stacks            where rank N's threads were, each time that somebody asked
      stall-N.txt              the Nth verdict on ranks that stood still, with all that was known of each
      rank-N.log               everything rank N printed, and the traceback it died with
      keeper.log               with several nodes: what torch said while they talked to each other
      error-N.json             an ErrorRecord: what rank N told of the exception that ended its script
      report.json              how the run ended: cause, victims, exit codes, restarts, nodes; `phalanx report` tells it

The files are the only interface between a run and what reports on it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx import messages, run_files
from phalanx.env import PET_PREFIX
from phalanx.errors import ForeignData, LaunchError, UsageError
from phalanx.messages import Count, ExitCode, Pid, Rank, Record, Seconds, Signal, Text


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
    """With the offset, as in ``gloo_send+0x1f``; the offset alone where the name is not known."""


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
    """What the rank knows of it beyond the message, in a sentence or two."""


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
    """Bytes: of the control group, or of the whole machine."""
    group: str
    """The control group whose limit was reached; empty when it was the machine's own memory."""


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
    """Where Python stood when native code crashed, innermost first, if the rank could still tell."""
    native: tuple[NativeFrame, ...] = ()
    """Where native code stood then, innermost first, if Python is new enough to tell (3.14)."""
    called: Frame | None = None
    """The line that had asked for the collective in which it failed or was stopped, if it was in one."""
    memory: Count | None = None
    """Bytes that it had in memory at most, as far as that was seen."""
    out_of_memory: OutOfMemory | None = None
    """Why the kernel has ended it, or a process that it needed; None when it has not."""
    shared_memory: SharedMemory | None = None
    """/dev/shm at its end, when that may be the reason."""
    updates: Count = 0
    """Optimizer steps that it had made in this attempt."""
    progress: tuple[Count, Count, Count] = (0, 0, 0)
    """The step of its last checkpoint, its epoch, and its step in that, as far as px.Checkpointer and px.track know."""

    @property
    def failed(self) -> bool:
        return self.error is not None or self.signal is not None or bool(self.exit_code)

    @property
    def status(self) -> int:
        """As a shell would give it: 128 + signal, or the exit code.

        The launcher may have stopped a rank that had failed by itself, when it had heard of another one first.
        """
        was_stopped = self.error is not None and self.signal in (signal.SIGTERM, signal.SIGKILL)
        if self.signal is not None and not was_stopped:
            return 128 + self.signal
        if self.error is not None:
            return self.error.exit_code or 1
        return self.exit_code or 0


def new_run_directory(base: Path, run_id: str) -> Path:
    """Makes ``base/run_id`` for this user alone; ``base/latest`` points at it."""
    try:
        at = run_files.open_base(base)
        try:
            if not os.listdir(at):  # noqa: PTH208
                _ignore_for_git(at)
            name = _first_free(at, run_id)
            run_files.point(at, name, "latest")
        finally:
            os.close(at)
    except OSError as error:
        raise LaunchError(
            f"cannot write the run directory {base / run_id}: {error.strerror}. Give another directory with --log-dir."
        ) from None
    return (base / name).absolute()


def _ignore_for_git(base: int) -> None:
    with contextlib.suppress(FileExistsError):  # another run has begun at the same moment
        file = os.open(".gitignore", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=base)
        try:
            os.write(file, b"*\n")
        finally:
            os.close(file)


def _first_free(base: int, run_id: str) -> str:
    """Two containers may share the directory and have the same pid in the same second."""
    for number in itertools.count():
        name = f"{run_id}-{number}" if number else run_id
        try:
            os.mkdir(name, 0o700, dir_fd=base)
        except FileExistsError:
            continue
        return name
    raise AssertionError("the numbers never end")


def find_run(text: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The run directory that a person means: a path, a name below the directory of runs, or None for the latest."""
    try:
        return _find_run(text, Path(environ.get(f"{PET_PREFIX}LOG_DIR") or "runs"))
    except OSError as error:
        whose = "; it belongs to another user" if isinstance(error, PermissionError) else ""
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}{whose}.") from None


def _find_run(text: str | None, base: Path) -> Path:
    if text is None:
        found = _latest(base)
        if found is None:
            raise UsageError(f"there is no run below {base}; give the directory that `phalanx run` printed.")
        return found
    for path in (Path(text), base / text):
        if (path / RUN_FILE).exists():
            return path
        found = _latest(path)
        if found is not None:
            return found
    what = "has no run.json" if Path(text).exists() else "does not exist"
    raise UsageError(f"{text} is no run directory: it {what}; give one that `phalanx run` printed.")


def _latest(base: Path) -> Path | None:
    """Of the runs below it, by the link, or where there can be none by the names, which begin with the date."""
    latest = base / "latest"
    if latest.is_symlink() and (latest / RUN_FILE).exists():
        name = latest.readlink()
        if len(name.parts) == 1:  # as we make it; any other leads out of here
            return base / name
    runs = sorted(path.parent for path in base.glob(f"[0-9]*/{RUN_FILE}"))
    return runs[-1] if runs else None


def new_run_id() -> str:
    """A name that sorts by time: date, time and the agent's pid."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def write_record(path: Path, record: object) -> None:
    """As JSON for people to read as well; whole or not at all."""
    run_files.write_whole(path, messages.indented(record) + "\n")


def error_path(run_directory: Path, rank: int) -> Path:
    return run_directory / f"error-{rank}.json"


KEEPER_LOG = "keeper.log"
RUN_FILE, REPORT_FILE, AGENT_EVENTS = "run.json", "report.json", "agent.events.jsonl"


def log_path(run_directory: Path, rank: int) -> Path:
    return run_directory / f"rank-{rank}.log"


def rank_events_path(run_directory: Path, rank: int) -> Path:
    return run_directory / f"rank-{rank}.events.jsonl"


class EventLog:
    """Appends events as JSON lines. Each line is one write, so a reader never sees half of one.

    A full disk ends the file, not the run. While its writer lives, the file is locked: see `is_being_written`.
    """

    def __init__(self, path: Path) -> None:
        import fcntl

        self._fd = run_files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, event: str, **fields: Any) -> None:
        line = messages.encode({"time": time.time(), "event": event, **fields})
        with contextlib.suppress(OSError):
            os.write(self._fd, line + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def is_being_written(path: Path) -> bool:
    """Whether the process that writes this event file lives, whatever its pid and whoever has that by now."""
    import fcntl

    try:
        fd = run_files.open_to_read(path)
    except OSError:  # there is none, or it cannot be read
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    else:
        return False
    finally:
        os.close(fd)


def read_events(path: Path, shape: Any = dict[str, Any]) -> list[Any]:
    """All events of this shape; of a disk that was full the last one may be cut off, and is left out."""
    found = []
    try:
        lines = run_files.read(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return found
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    for line in lines:
        with contextlib.suppress(ForeignData):
            found.append(messages.decode(line, shape, str(path)))
    return found
