"""The first steps of a run, in the order that starts it soonest.

What cannot work is an error before anything starts. Then the zygote is started, and only while it imports torch does
the agent import the rest of itself.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from phalanx import events, ports
from phalanx.errors import UsageError
from phalanx.launch import program
from phalanx.launch.devices import thread_setting
from phalanx.launch.nursery import Nursery
from phalanx.launch.spec import LaunchSpec


def run(spec: LaunchSpec, environ: Mapping[str, str]) -> int:
    """Starts a run on this machine and stays until its end; returns the exit code."""
    if sys.platform != "linux":
        raise UsageError(f"phalanx run needs Linux; this is {sys.platform}. Use torchrun here, phalanx in the script.")
    program.check(spec)
    _raise_file_limit(spec)
    if spec.nnodes[1] > 1:
        raise UsageError(
            f"--nnodes {spec.nnodes[1]}: several machines are not supported yet; "
            "--dry-run shows the ranks they would have."
        )
    with contextlib.closing(ports.listen(ports.LOOPBACK, spec.master_port)) as listener:
        directory = events.new_run_directory(Path(spec.log_dir), events.new_run_id())
        environment = {**environ, **thread_setting(spec.nproc_per_node, environ), "PHALANX_RUN_DIR": str(directory)}
        nursery = Nursery(
            environment,
            start_method="exec" if spec.program.kind == "command" else spec.start_method,
            preload=spec.preload,
            late=program.late_imports(spec),
            script_directory=program.script_directory(spec),
            listener=listener,
        )
    with contextlib.closing(nursery):
        from phalanx.launch.agent import Agent

        return Agent(spec, environment, nursery, directory).run()


def _raise_file_limit(spec: LaunchSpec) -> None:
    """The agent holds three pipes for each rank; the usual soft limit of 1024 is a default, not a rule."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 12 * spec.nproc_per_node + 64
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(f"{spec.nproc_per_node} ranks need {needed} open files, but the limit (ulimit -n) is {hard}.")
    if needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
