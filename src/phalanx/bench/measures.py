"""The measurements, each of one command. All of them start probe.py, in a directory of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from phalanx.bench import contenders
from phalanx.bench.command import CommandFailed, Running, running
from phalanx.bench.contenders import TORCHRUN, Contender

_TORCHRUN_RESTART_TIMEOUT = 30.0

Outcome = tuple[float | None, str]
"""A sample's value and note."""


def start(contender: Contender, ranks: int, place: Path, timeout: float) -> Outcome:
    """Seconds from the command to the moment when the last rank has passed the barrier."""
    argv = contender.argv(ranks, _probe(place, contender.mode, ranks))
    with running(argv, place, timeout) as command:
        command.finish()
        notes = _notes(place)
        short = _shortfall(notes, ranks)
        if short and not contender.may_fall_short:
            raise command.failure(short)
    return (None, short) if short else (max(note["time"] for note in notes) - command.started, "")


def memory(contender: Contender, ranks: int, place: Path, timeout: float) -> Outcome:
    """Bytes of PSS while all ranks wait."""
    argv = contender.argv(ranks, _probe(place, "hold", ranks))
    with _fifo(place / "ready") as ready, _fifo(place / "go") as go, running(argv, place, timeout) as command:
        command.read(ready.fileno(), ranks)
        size, processes = command.pss()
        go.close()  # the ranks wait until nobody can write to it any more
        command.finish()
    return size, f"{processes} processes"


def _fifo(path: Path) -> BinaryIO:
    os.mkfifo(path)
    # For reading and writing, or opening it would wait for the other side.
    return path.open("r+b", buffering=0)


def restart(contender: Contender, ranks: int, place: Path, timeout: float) -> Outcome:
    """Seconds from the death of rank 1 to the moment when the last rank of the next attempt has reduced."""
    argv = contender.argv(ranks, _probe(place, "restart", ranks), ["--max-restarts", "1"])
    with running(argv, place, restart_timeout(contender, timeout)) as command:
        if failure := finish_restart(contender, command):
            return None, failure
        return _restart_seconds(command, place, ranks), ""


def restart_timeout(contender: Contender, timeout: float) -> float:
    """Some of torchrun's restarts hang."""
    return min(timeout, _TORCHRUN_RESTART_TIMEOUT) if contender is TORCHRUN else timeout


def finish_restart(contender: Contender, command: Running) -> str:
    """Waits for the end of a command that restarts; says how it failed, if it is torchrun and did."""
    try:
        command.finish()
    except CommandFailed as error:
        if contender is not TORCHRUN:
            raise
        # The store still has the addresses of the first attempt. A rank that reads one before it is written anew
        # connects to nobody: with torch 2.13 some restarts work, some end with an error, and some hang.
        return f"fails: {error.how}"
    return ""


def _restart_seconds(command: Running, place: Path, ranks: int) -> float:
    notes = _notes(place)
    killed = [note["time"] for note in notes if note["attempt"] == 0]
    back = [note["time"] for note in notes if note["attempt"] == 1]
    if len(killed) != 1 or len(back) != ranks:
        raise command.failure(f"had {len(killed)} rank(s) killed and {len(back)} of {ranks} back")
    return max(back) - killed[0]


def phalanx_help(place: Path, timeout: float) -> Outcome:
    """Seconds from the command to its end."""
    with running(contenders.phalanx_help(), place, timeout) as command:
        return command.finish(), ""


def _probe(place: Path, mode: str, ranks: int) -> list[str]:
    return [str(place / "probe.py"), str(place), mode, str(ranks)]


def _notes(place: Path) -> list[dict]:
    return [json.loads(line) for path in place.glob("rank-*.jsonl") for line in path.read_text().splitlines()]


def _shortfall(notes: Sequence[dict], ranks: int) -> str:
    """What is wrong with the world that was started, empty when nothing is."""
    if len(notes) == ranks and all(note["world_size"] == ranks for note in notes):
        return ""
    return "starts one process" if len(notes) == 1 else f"starts {len(notes)} ranks instead of {ranks}"
