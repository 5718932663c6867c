"""One rank as the agent sees it: its pipes and logs, what it reported, how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx import events, messages, run_files
from phalanx.errors import ForeignData
from phalanx.launch.output.console import Console
from phalanx.launch.output.line_splitter import Tail
from phalanx.launch.output.logs import FilteredLog, LogFile, OutputPipe, OutputRoute, rank_prefix
from phalanx.launch.process.zygote_messages import Exited
from phalanx.launch.spec.launch_spec import LaunchSpec, Placement
from phalanx.messages import Record, StopSignal, Text

_TAIL_LINES = 5
_LONGEST_NOTICE = 400
_TO_LEAVE = 30.0
"""Seconds. A rank that lives on for longer has handled the exception with which it left its group."""
_MOST_LINES = 1000
_MOST_REQUESTS = 16
_STREAMS = {1: "stdout.log", 2: "stderr.log"}


class StopRequest(Record, frozen=True):
    """A rank has got a signal, or asks all ranks to stop."""

    signal: StopSignal
    reason: Text


class RankReport(Record, frozen=True):
    """One line of a rank's report, which the rank writes with the standard library alone."""

    error: events.ErrorRecord | None = None
    leaving: events.ErrorRecord | None = None
    """The exception with which it is leaving its group; it counts if the rank ends before it reports an error."""
    thread: events.ThreadDeath | None = None
    notice: Text | None = None
    stop: StopRequest | None = None


def stop_steps(first: int | None, timeout: float) -> list[tuple[float, int]]:
    """The signals that end ranks, with the moments (on the monotonic clock) when they are due.

    SIGINT leaves the last second of the timeout to SIGTERM; whatever is left at its end is killed.
    """
    start = time.monotonic()
    steps: list[tuple[float, int]] = [(start + timeout, signal.SIGKILL)]
    if timeout > 0 and first is not None:
        if first == signal.SIGINT:
            steps.insert(0, (start + timeout - min(1.0, timeout / 2), signal.SIGTERM))
        steps.insert(0, (start, first))
    return steps


class RankProcess:
    """A rank of the running attempt."""

    def __init__(
        self,
        place: Placement,
        pipes: Sequence[OutputPipe] = (),
        tail: Tail | None = None,
        logs: Sequence[LogFile] = (),
        error_logs: Sequence[LogFile] = (),
    ) -> None:
        """``error_logs``: those of ``logs`` that get its traceback, as standard error would have."""
        self.rank = place.rank
        self.pipes = pipes
        self.pid: int | None = None
        self.error: events.ErrorRecord | None = None
        self._leaving: events.ErrorRecord | None = None
        self.thread_death: events.ThreadDeath | None = None
        self.notices: list[str] = []
        """Notices for the console, each text once."""
        self._stop_requests: list[StopRequest] = []
        self.malformed: str | None = None
        """Why the first malformed line of its report was refused."""
        self.exited: Exited | None = None
        self.report_ended = False
        self.asked_at: float | None = None
        """When the agent told it to stop."""
        self.asked_with: int | None = None
        """The last signal that the agent sent it to stop it."""
        self.report_reader, self.report_writer = os.pipe()
        os.set_blocking(self.report_reader, False)
        self._tail = tail or Tail()
        self._logs = logs
        self._error_logs = error_logs
        self._unfinished = self._dump = b""
        self._exit_time = 0.0

    def read_report(self) -> bool:
        """Reads what the rank has reported since; returns whether its error is new."""
        try:
            part = os.read(self.report_reader, 1 << 16)
        except BlockingIOError:
            return False
        if not part:
            self.report_ended = True
        had_error = self.error is not None
        *lines, self._unfinished = (self._unfinished + part).split(b"\n")
        for line in lines:
            if line.startswith(b'{"'):
                self._read_line(line)
            else:
                self._dump += line + b"\n"
        return self.error is not None and not had_error

    def _read_line(self, line: bytes) -> None:
        try:
            report = messages.decode(line, RankReport, f"the report of rank {self.rank}")
        except ForeignData as error:  # a script may have written into all files that are open
            self.malformed = self.malformed or str(error)
            return
        self.error, self.thread_death = self.error or report.error, report.thread or self.thread_death
        self._leaving = report.leaving or self._leaving
        if report.stop is not None and len(self._stop_requests) < _MOST_REQUESTS:
            self._stop_requests.append(report.stop)
        notice = "".join(filter(str.isprintable, report.notice or ""))[:_LONGEST_NOTICE]
        if notice and notice not in self.notices:
            self.notices.append(notice)

    def take_stop_requests(self) -> list[StopRequest]:
        taken, self._stop_requests = self._stop_requests, []
        return taken

    @property
    def _crash_dump(self) -> bytes:
        """What faulthandler has written into the report pipe: all that is not a report."""
        return self._dump + (b"" if self._unfinished.startswith(b'{"') else self._unfinished)

    @property
    def has_failed(self) -> bool:
        exited = self.exited
        return self.error is not None or (exited is not None and bool(exited.signal or exited.exit_code))

    @property
    def has_crashed(self) -> bool:
        """Whether an exception or a signal has ended it that asks no run to stop."""
        number = self.exited.signal if self.exited is not None else None
        return self.error is not None or number not in (None, signal.SIGTERM, signal.SIGINT)

    @property
    def is_victim(self) -> bool:
        """Whether its error, or what it has printed before it crashed, says only that another rank went away."""
        if not self.has_failed:
            return False
        from phalanx.failure import root_cause  # a healthy run needs nothing of failure

        if self.error is not None:
            return root_cause.is_consequence(self.error)
        self._read_output()
        return root_cause.is_victim(self.ending())

    def set_exited(self, exited: Exited) -> None:
        self.exited = exited
        self._exit_time = time.time()
        if self._leaving is not None and self.has_failed and self._exit_time - self._leaving.time < _TO_LEAVE:
            self.error = self.error or self._leaving

    def has_disagreed_on_gloo(self) -> bool:
        """Whether gloo has ended it because what came from another rank had another size."""
        if self.exited is None or self.exited.signal != signal.SIGABRT:
            return False
        from phalanx.failure.signal_meaning import gloo_mismatch

        self._read_output()
        return gloo_mismatch(self.ending()) is not None

    def _read_output(self) -> None:
        """Reads what it has printed just before its end: the reason, perhaps."""
        for pipe in self.pipes:
            if not pipe.ended:
                pipe.read()

    def ending(self) -> events.Ending:
        """Returns how it ended; only after it has exited and its pipes are read to the end."""
        assert self.exited is not None
        failed_at = self.error.time if self.error else self._exit_time
        ending = events.Ending(
            rank=self.rank,
            pid=self.exited.pid,
            time=failed_at,
            exit_code=self.exited.exit_code,
            signal=self.exited.signal,
            asked=self.asked_at is not None and self.asked_at <= failed_at,
            error=self.error,
            tail=self._tail.lines(_TAIL_LINES),
            host=socket.gethostname(),
        )
        return self._explained(ending) if ending.failed else ending

    def _explained(self, ending: events.Ending) -> events.Ending:
        """Adds what its last output, and the dump of a crash, say about a failure."""
        from phalanx.failure import crash_dump, device_errors
        from phalanx.failure.signal_meaning import gloo_mismatch

        printed = self._tail.lines(_MOST_LINES)
        if ending.signal:
            # A script that has enabled faulthandler itself gets the dump on its standard error.
            dump = (self._crash_dump or self._tail.data).decode(errors="replace")
            printed = crash_dump.without_dump(printed)
            frames, native = crash_dump.python_frames(dump), crash_dump.native_frames(dump)
            ending = messages.replace(ending, crash=frames, native=native)
        shown = tuple(line for line in printed if not device_errors.is_noise(line))[-_TAIL_LINES:]
        ending = messages.replace(ending, tail=shown)
        if gloo_mismatch(ending) is not None or (ending.error is None and ending.signal not in (None, signal.SIGABRT)):
            return ending
        message = ending.error.message if ending.error is not None else None
        return messages.replace(ending, device_error=device_errors.find(message, printed))

    def close(self) -> None:
        """Everything is read: writes the traceback to the end of the log and closes all descriptors."""
        last = self.error.traceback.encode(errors="replace") if self.error else self._crash_dump
        for log in self._error_logs if last else ():
            log.write(b"\n" * self._tail.is_open + last)
        for pipe in self.pipes:
            pipe.close()
        for log in self._logs:
            log.close()
        os.close(self.report_reader)
        self.close_writers()

    def close_writers(self) -> None:
        """Closes our ends for writing once the worker has its own, or the pipes would never end."""
        for pipe in self.pipes:
            pipe.close_writer()
        if self.report_writer >= 0:
            os.close(self.report_writer)
            self.report_writer = -1


def open_rank(
    spec: LaunchSpec,
    place: Placement,
    run_directory: Path,
    attempt: int,
    console: Console,
    resume: Callable[[OutputPipe], None],
    complain: Callable[[str], None],
) -> RankProcess:
    """Opens the pipes and logs of a rank, by torchrun's rules for --redirects, --tee and the filter."""
    local_rank = place.local_rank
    tail = Tail()
    log = LogFile(events.log_path(run_directory, place.rank), complain)
    if attempt:
        _remove_old_files(run_directory, place.rank)
        log.write(f"--- attempt {attempt + 1} ---\n".encode())
    logs = [log]
    pipes = []
    for stream, fd in ((1, console.out), (2, console.err)):
        files = [log]
        directory = run_directory / f"attempt_{attempt}"
        redirected = spec.redirects.get(local_rank, 0) & stream
        if redirected or spec.tee.get(local_rank, 0) & stream:
            files.append(LogFile(directory / str(local_rank) / _STREAMS[stream], complain, run_directory))
        shown = not redirected and (spec.local_ranks_filter is None or local_rank in spec.local_ranks_filter)
        if shown and (texts := spec.duplicate_filters.get(stream)):
            plain = rank_prefix(place.rank, place.world_size, coloured=False)
            files.append(FilteredLog(directory / f"filtered_{_STREAMS[stream]}", complain, texts, plain))
        logs += files[1:]
        prefix = None
        if place.world_size > 1:
            prefix = rank_prefix(place.rank, place.world_size, console.colours, spec.node_name)
        pipes.append(OutputPipe(OutputRoute(files, tail, fd if shown else None, prefix), console, resume))
    return RankProcess(place, pipes, tail, logs, error_logs=files)


def _remove_old_files(run_directory: Path, rank: int) -> None:
    """Files of an earlier attempt would be taken for this one's until it has written its own."""
    from phalanx.status.layout import status_path  # which a first attempt does without

    for path in (events.error_path(run_directory, rank), status_path(run_directory, rank)):
        with contextlib.suppress(OSError):  # no longer ours: then nothing is written there, either
            run_files.remove(path)
