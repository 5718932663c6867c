"""``phalanx run`` and ``python -m phalanx.launch``: from a command line to a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

from phalanx.launch import parse
from phalanx.launch.spec.launch_spec import LaunchSpec


def run(arguments: list[str]) -> int:
    """``phalanx run``, with the flags of torchrun."""
    return _start(*parse.parse(arguments, os.environ), arguments)


def launch(arguments: list[str]) -> int:
    """``python -m phalanx.launch``, with the flags of ``python -m torch.distributed.launch``."""
    return _start(*parse.parse_launch(arguments, os.environ), arguments, is_launch=True)


def remote() -> NoReturn:
    """The agent of one host, in a run that a command on another machine has started."""
    from phalanx.launch.remote import remote_agent

    def run_agent(spec: LaunchSpec, environ: Mapping[str, str]) -> int:
        from phalanx.launch import start

        return start.run(spec, environ)

    remote_agent.main(parse.parse, parse.parse_launch, run_agent)


def _start(spec: LaunchSpec, dry_run: bool, arguments: list[str], *, is_launch: bool = False) -> int:
    """What is imported next depends on what is asked for; the agent is quicker without the rest."""
    if dry_run:
        from phalanx.launch.dry_run import show

        show(spec, os.environ)
        return 0
    if spec.host_list is not None:
        from phalanx.launch.remote.conductor import conduct

        return conduct(spec, arguments, os.environ, is_launch=is_launch)
    from phalanx.launch import start

    return start.run(spec, os.environ)
