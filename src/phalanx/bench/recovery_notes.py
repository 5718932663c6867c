"""From the notes that a killed run leaves to the seconds it was away, once it is sure that it went on rightly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.bench.results import Sample

Note = Mapping[str, Any]
Losses = Mapping[int, float]
"""Of rank 0, by step."""

PHASES = ("notice", "stop", "begin", "join", "build", "load", "step")
"""What comes one after the other between the death and the next finished step; see `phases`."""

_SAME = 1e-3
"""Sums of several ranks depend on the order, and a few steps make that larger. Other steps differ by far more."""


@dataclass(frozen=True)
class Plan:
    """Of one training run, the same for all contenders."""

    ranks: int
    width: int
    steps: int = 30
    every: int = 10
    killed_after: int = 25

    @property
    def last_saved(self) -> int:
        return self.killed_after // self.every * self.every


@dataclass(frozen=True)
class Recovery(Sample):
    """One killed run."""

    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each of PHASES, as far as they are known."""


def read(place: Path) -> list[Note]:
    return [json.loads(line) for path in place.glob("rank-*.jsonl") for line in path.read_text().splitlines()]


def read_agent(place: Path) -> list[Note]:
    """The event file of phalanx run; empty for other launchers."""
    path = place / "runs" / "latest" / "agent.events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(notes: Sequence[Note], attempt: int) -> dict[int, float]:
    return {note["step"]: note["loss"] for note in notes if _is(note, "step", attempt)}


def was_killed(notes: Sequence[Note]) -> bool:
    """Whether the run came to where rank 1 kills itself: what fails after that is the restart."""
    return any(note["event"] == "killed" for note in notes)


def problem(notes: Sequence[Note], plan: Plan, reference: Losses) -> str:
    """What is wrong with how the run went on; empty when nothing is."""
    killed = [note for note in notes if note["event"] == "killed"]
    if len(killed) != 1:
        return f"had {len(killed)} ranks killed instead of 1"
    resumed = [note["step"] for note in notes if note["event"] == "loaded" and note["attempt"] == 1]
    if resumed != [plan.last_saved] * plan.ranks:
        return f"went on from the steps {resumed}, and {plan.ranks} ranks should have from {plan.last_saved}"
    # Rank 0 may not have come to the end of the step after which rank 1 killed itself.
    wanted = {0: range(1, plan.killed_after), 1: range(plan.last_saved + 1, plan.steps + 1)}
    for attempt, steps in wanted.items():
        found = losses(notes, attempt)
        if missing := [step for step in steps if step not in found]:
            return f"has not taken the steps {missing} in attempt {attempt}"
        for step in steps:
            if not math.isclose(found[step], reference[step], rel_tol=_SAME):
                return f"has the loss {found[step]:g} at step {step} of attempt {attempt}, not {reference[step]:g}"
    return ""


def phases(notes: Sequence[Note], agent: Sequence[Note]) -> dict[str, float]:
    """How long each took on rank 0. Only phalanx tells the first two; of others they are in ``begin``.
    A restart that failed has those that it came to the end of.

    notice  from the death to the agent's knowing of it
    stop    to the end of all other ranks
    begin   to the script's main, with torch imported
    join    to a process group
    build   to a model and an optimizer, and to what is needed for loading
    load    to a state of the last saved step
    step    to the end of the first step
    """
    (killed,) = [note["time"] for note in notes if note["event"] == "killed"]
    ends = {"notice": _first(agent, "exited"), "stop": _first(agent, "restarting")}
    events = {"begin": "begun", "join": "joined", "build": "built", "load": "loaded", "step": "step"}
    ends |= {phase: _first([note for note in notes if _is(note, event, 1)], event) for phase, event in events.items()}
    found, before = {}, killed
    for phase in PHASES:
        end = ends[phase]
        if end is not None:
            found[phase] = end - before
            before = end
    return found


def _is(note: Note, event: str, attempt: int) -> bool:
    """Of rank 0."""
    return (note["event"], note["attempt"], note["rank"]) == (event, attempt, 0)


def _first(notes: Sequence[Note], event: str) -> float | None:
    return min((note["time"] for note in notes if note["event"] == event), default=None)
