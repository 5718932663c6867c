"""Who is compared: the launchers, as the commands that a user would type."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.bench.machine import installed
from phalanx.errors import PhalanxError


@dataclass(frozen=True)
class Contender:
    """One way to start ranks."""

    name: str
    command: Callable[[int], list[str]]
    """The launcher and its flags for so many ranks; the script comes after them."""
    mode: str = "up"
    """What the probe is told to do when starting is measured."""
    may_fall_short: bool = False
    """It may start fewer ranks than asked for; that is then its result, rather than an error."""

    def argv(self, ranks: int, script: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
        """``flags``: further ones of the launcher, such as --max-restarts."""
        program, *rest = self.command(ranks)
        return [_find(program), *rest, *flags, *script]


def _accelerate(ranks: int) -> list[str]:
    quiet = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    # --cpu starts one process whatever the number; --multi_gpu starts all of them, cards or not, but refuses 1.
    return ["accelerate", "launch", *["--multi_gpu"] * (ranks > 1), *quiet, "--num_processes", str(ranks)]


FORK = Contender("phalanx fork", lambda n: ["phalanx", "run", "--start-method", "fork", "--nproc-per-node", str(n)])
EXEC = Contender("phalanx exec", lambda n: ["phalanx", "run", "--start-method", "exec", "--nproc-per-node", str(n)])
TORCHRUN = Contender("torchrun", lambda n: ["torchrun", "--standalone", "--nproc-per-node", str(n)])
MP_SPAWN = Contender("mp.spawn", lambda _: [sys.executable], mode="spawn")
ACCELERATE = Contender("accelerate launch", _accelerate, may_fall_short=True)


def present() -> list[Contender]:
    """All that can be started here."""
    return [FORK, EXEC, TORCHRUN, MP_SPAWN, *([ACCELERATE] if installed("accelerate") else [])]


def phalanx_help() -> list[str]:
    return [_find("phalanx"), "--help"]


def _find(program: str) -> str:
    """The program that belongs to this interpreter; only failing that, the one on PATH."""
    beside = Path(sys.executable).parent / program  # a path of its own stays as it is
    found = str(beside) if beside.exists() else shutil.which(program)
    if found is None:
        raise PhalanxError(f"there is no {program} beside {sys.executable} nor on PATH; install it there.")
    return found
