"""The ranks of this node in one attempt: their pipes, their environment, their start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx import events, run_files
from phalanx.launch.agent.attempt_run import AttemptRun
from phalanx.launch.agent.rank_process import RankProcess, new_rank_process
from phalanx.launch.output.console import Console
from phalanx.launch.output.pipe_set import PipeSet
from phalanx.launch.spec.launch_spec import LaunchSpec, Placement, WorkerSpec, worker_environment


@dataclass(frozen=True)
class RankStarter:
    """What all attempts have in common."""

    spec: LaunchSpec
    environ: Mapping[str, str]
    directory: Path
    interface: str | None
    """The network to the other nodes, if there are any."""
    console: Console
    pipes: PipeSet
    complain: Callable[[str], None]

    def start(self, watch: AttemptRun, places: Sequence[Placement], master: tuple[str, int], attempt: int) -> None:
        """They are asked for; the watch hears of them."""
        spec = self.spec
        run = self.directory.name if spec.run_id == "none" else spec.run_id
        for place in places:
            if attempt:
                self._remove_old_files(place.rank)
            member = new_rank_process(
                spec, place, self.directory, attempt, self.console, self.pipes.resume, self.complain
            )
            environment = worker_environment(self.environ, spec, place, master, attempt, run, self.interface)
            cpus = spec.cpus[place.local_rank] if spec.cpus is not None else None
            worker = WorkerSpec(place.rank, place.local_rank, spec.program, environment, spec.start_method, cpus)
            self._start(watch, member, worker)

    def _remove_old_files(self, rank: int) -> None:
        """What an earlier attempt has written would be taken for this one's until it has written its own."""
        from phalanx.status import status_path

        for path in (events.error_path(self.directory, rank), status_path(self.directory, rank)):
            with contextlib.suppress(OSError):  # no longer ours: then nothing is written there, either
                run_files.remove(path)

    def _start(self, watch: AttemptRun, member: RankProcess, worker: WorkerSpec) -> None:
        stdin = _standard_input()
        try:
            watch.start(member, worker, [stdin, *(pipe.writer for pipe in member.pipes)])
        finally:
            os.close(stdin)
        for pipe in member.pipes:
            self.pipes.add(pipe)


def _standard_input() -> int:
    try:
        return os.dup(0)
    except OSError:  # the agent was started with standard input closed
        return os.open(os.devnull, os.O_RDONLY)
