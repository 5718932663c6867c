"""What the agent leaves in the run directory: the order, what happened, how each rank ended, and why."""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from phalanx import events
from phalanx.diagnose import report
from phalanx.diagnose.findings import Verdict
from phalanx.launch.spec import LaunchSpec


class Record:
    """One run on this node. ``say`` is told what cannot be written, which is no reason to stop a run."""

    def __init__(self, directory: Path, say: Callable[[list[str]], None]) -> None:
        self._directory, self._say = directory, say
        self._log = events.EventLog(directory / "agent.events.jsonl")
        self._started = time.time()
        self.host = socket.gethostname()
        self.place = report.shorten_path(str(directory))
        """The run directory, as a person would write it."""
        self._stragglers: list[Mapping[str, object]] = []

    def note(self, kind: str, **fields: object) -> None:
        """Into the event file."""
        self._log.write(kind, **fields)

    def keep(self, name: str, content: Mapping[str, object]) -> None:
        """A file of the run directory."""
        try:
            events.write_json(self._directory / name, content)
        except OSError as error:
            self._say([f"cannot write {name} into {self.place}: {error.strerror}."])

    def keep_order(self, spec: LaunchSpec) -> None:
        content = {
            "run_id": self._directory.name,
            "host": self.host,
            "started": self._started,
            "command": sys.argv,
            "directory": str(Path.cwd()),
            "executable": sys.executable,
            "prefix": sys.prefix,
            "spec": dataclasses.asdict(spec),
        }
        self.keep("run.json", content)

    def keep_straggler(self, fields: Mapping[str, object]) -> None:
        """A rank that holds up the others, or no longer."""
        self._stragglers.append(fields)
        self.note("straggler", **fields)

    def keep_errors(self, endings: list[events.Ending]) -> None:
        for ending in endings:
            if ending.error is not None:
                self.keep(f"error-{ending.rank}.json", dataclasses.asdict(ending.error))

    def keep_end(self, exit_code: int, endings: list[events.Ending], verdict: Verdict | None, attempt: int) -> None:
        content = {
            "exit_code": exit_code,
            "attempts": attempt + 1,
            "seconds": round(time.time() - self._started, 3),
            "cause": dataclasses.asdict(verdict.cause) if verdict else None,
            "victims": verdict.victims if verdict else (),
            "stragglers": self._stragglers,
            "ranks": [dataclasses.asdict(ending) for ending in endings],
        }
        self.keep("report.json", content)
        self.note("ended", exit_code=exit_code)

    def failure_block(self, verdict: Verdict, world_size: int, attempts: int, elsewhere: str | None) -> list[str]:
        """For the console. ``elsewhere``: the run directory of the node where the cause was, if it is another one."""
        log = events.log_path(Path(elsewhere) if elsewhere else self._directory, verdict.cause.rank)
        return report.failure_block(
            verdict,
            world_size=world_size,
            host=verdict.cause.host or self.host,
            started=self._started,
            log=str(log) if elsewhere else report.shorten_path(str(log)),
            attempts=attempts,
        )

    def close(self) -> None:
        self._log.close()
