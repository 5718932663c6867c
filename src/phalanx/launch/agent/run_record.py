"""What the agent leaves in the run directory: the order, what happened, how each rank ended, and why."""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx import events
from phalanx.errors import LaunchError
from phalanx.failure import failure_text
from phalanx.failure.root_cause import Verdict
from phalanx.launch.spec.launch_spec import LaunchSpec
from phalanx.source_lines import shorten_path


class Record:
    """One run on this node. ``say`` is told what cannot be written, which is no reason to stop a run."""

    def __init__(self, directory: Path, say: Callable[[list[str]], None]) -> None:
        self._directory, self._say = directory, say
        try:
            self._log = events.EventLog(directory / events.AGENT_EVENTS)
        except OSError as error:
            raise LaunchError(f"cannot write the run directory {directory}: {error.strerror}.") from None
        self._started = time.time()
        self._restarts: list[dict[str, Any]] = []
        self.host = socket.gethostname()
        self.place = shorten_path(str(directory))
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
        self.keep(events.RUN_FILE, content)

    def keep_straggler(self, fields: Mapping[str, object]) -> None:
        """A rank that holds up the others, or no longer."""
        self._stragglers.append(fields)
        self.note("straggler", **fields)

    def keep_errors(self, endings: list[events.Ending]) -> None:
        for ending in endings:
            if ending.error is not None:
                self.keep(f"error-{ending.rank}.json", dataclasses.asdict(ending.error))

    def keep_restart(self, attempt: int, reason: str, verdict: Verdict | None) -> None:
        """``attempt``: the number of the next one."""
        self._restarts.append({"attempt": attempt, "time": time.time(), "reason": reason, **_fields(verdict)})
        self.note("restarting", attempt=attempt, cause=reason)

    def keep_end(
        self,
        exit_code: int,
        endings: Sequence[events.Ending] = (),
        verdict: Verdict | None = None,
        attempt: int = 0,
        said: Sequence[str] = (),
        directory_of: Callable[[events.Ending], str | None] = lambda _: None,
        hang: Mapping[str, object] | None = None,
    ) -> None:
        """
        Args:
            said: the last lines on the console.
            directory_of: the run directory of a rank on another node.
            hang: for which the ranks were ended; it is the cause then.
        """
        nodes: dict[str, dict[str, Any]] = {}
        for ending in endings:
            directory = directory_of(ending) or str(self._directory)
            nodes.setdefault(ending.host, {"directory": directory, "ranks": []})["ranks"].append(ending.rank)
        content = {
            "exit_code": exit_code,
            "attempts": attempt + 1,
            "started": self._started,
            "seconds": round(time.time() - self._started, 3),
            **_fields(verdict, hang),
            "said": list(said),
            "restarts": self._restarts,
            "nodes": nodes,
            "stragglers": self._stragglers,
            "ranks": [dataclasses.asdict(ending) for ending in endings],
        }
        self.keep(events.REPORT_FILE, content)
        self.note("ended", exit_code=exit_code)

    def failure_block(self, verdict: Verdict, world_size: int, attempts: int, elsewhere: str | None) -> list[str]:
        """For the console. ``elsewhere``: the run directory of the node where the cause was, if it is another one."""
        log = events.log_path(Path(elsewhere) if elsewhere else self._directory, verdict.cause.rank)
        return failure_text.failure_block(
            verdict,
            world_size=world_size,
            host=verdict.cause.host or self.host,
            started=self._started,
            log=str(log) if elsewhere else shorten_path(str(log)),
            attempts=attempts,
        )

    def close(self) -> None:
        self._log.close()


def _fields(verdict: Verdict | None, hang: Mapping[str, object] | None = None) -> dict[str, Any]:
    return {
        "cause": dataclasses.asdict(verdict.cause) if verdict else {"hang": hang} if hang else None,
        "alike": verdict.alike if verdict else (),
        "victims": verdict.victims if verdict else (),
        "elsewhere": [{"called": dataclasses.asdict(frame), "ranks": ranks} for frame, ranks in verdict.elsewhere]
        if verdict
        else [],
    }
