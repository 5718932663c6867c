"""The files that the agent writes into the run directory: the order, the events, how each rank ended, and why."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx import events, messages, run_files
from phalanx.errors import LaunchError
from phalanx.events import Elsewhere, Failure, HangRecord, NodeRanks, ReportFile, Restart, RunFile, StopRecord
from phalanx.launch.spec.launch_spec import LaunchSpec
from phalanx.source_lines import shorten_path

if TYPE_CHECKING:
    from phalanx.failure.root_cause import Verdict


class RunRecord:
    """The record of one run on this node. ``say`` prints what cannot be written, which never stops a run."""

    def __init__(self, directory: Path, say: Callable[[list[str]], None]) -> None:
        self._directory, self._say = directory, say
        try:
            self._log = run_files.EventLog(directory / events.AGENT_EVENTS)
        except OSError as error:
            raise LaunchError(f"cannot write the run directory {directory}: {error.strerror}.") from None
        self.started = time.time()
        self._restarts: list[Restart] = []
        self.host = socket.gethostname()
        self.place = shorten_path(str(directory))
        """The run directory, as a person would write it."""
        self._stragglers: list[Mapping[str, object]] = []

    def note(self, kind: str, **fields: object) -> None:
        """Writes a line of the event file."""
        self._log.write(kind, **fields)

    def keep(self, name: str, content: object) -> None:
        """Writes a file of the run directory."""
        try:
            events.write_record(self._directory / name, content)
        except OSError as error:
            self._say([f"cannot write {name} into {self.place}: {error.strerror}."])

    def keep_order(self, spec: LaunchSpec) -> None:
        content = RunFile(
            run_id=self._directory.name,
            host=self.host,
            started=self.started,
            command=tuple(sys.argv),
            directory=str(Path.cwd()),
            executable=sys.executable,
            prefix=sys.prefix,
            spec=spec,
        )
        self.keep(events.RUN_FILE, content)

    def keep_straggler(self, fields: Mapping[str, object]) -> None:
        """Records a rank that holds up the others, or no longer does."""
        self._stragglers.append(fields)
        self.note("straggler", **fields)

    def keep_errors(self, endings: list[events.Ending]) -> None:
        for ending in endings:
            if ending.error is not None:
                self.keep(f"error-{ending.rank}.json", ending.error)

    def keep_restart(self, attempt: int, reason: str, verdict: Verdict | None) -> None:
        """Records why the next attempt, number ``attempt``, is begun."""
        why = messages.asdict(_failure(verdict))
        self._restarts.append(Restart(attempt=attempt, time=time.time(), reason=reason, **why))
        self.note("restarting", attempt=attempt, cause=reason)

    def keep_end(
        self,
        exit_code: int,
        endings: Sequence[events.Ending] = (),
        verdict: Verdict | None = None,
        attempt: int = 0,
        said: Sequence[str] = (),
        directory_of: Callable[[events.Ending], str | None] = lambda _: None,
        hang: HangRecord | None = None,
        stop: StopRecord | None = None,
    ) -> None:
        """Writes report.json.

        Args:
            said: the last lines on the console.
            directory_of: returns the run directory of a rank on another node.
            hang: the hang for which the ranks were ended, if they were.
        """
        hosts: dict[str, list[events.Ending]] = {}
        for ending in endings:
            hosts.setdefault(ending.host, []).append(ending)
        nodes = {
            host: NodeRanks(directory_of(those[0]) or str(self._directory), tuple(each.rank for each in those))
            for host, those in hosts.items()
        }
        content = ReportFile(
            exit_code=exit_code,
            attempts=attempt + 1,
            started=self.started,
            seconds=round(time.time() - self.started, 3),
            said=tuple(said),
            restarts=tuple(self._restarts),
            nodes=nodes,
            stop=stop,
            stragglers=tuple(self._stragglers),
            ranks=tuple(endings),
            **messages.asdict(_failure(verdict, hang)),
        )
        self.keep(events.REPORT_FILE, content)
        self.note("ended", exit_code=exit_code)

    def close(self) -> None:
        self._log.close()


def _failure(verdict: Verdict | None, hang: HangRecord | None = None) -> Failure:
    if verdict is None:
        return Failure(hang=hang)
    elsewhere = tuple(Elsewhere(frame, ranks) for frame, ranks in verdict.elsewhere)
    return Failure(verdict.cause, None, verdict.alike, verdict.victims, elsewhere)
