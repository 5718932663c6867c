"""How the ranks of a run stand: from two looks at each to a row, and from all rows to who holds up whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.status import PHASES, Collective, Status, Window
from phalanx.status.layout import DATA, OWN
from phalanx.system.procfs import ProcessFacts
from phalanx.watchdog.straggler import straggler_detector, straggler_text

_LOOP = tuple(PHASES[phase] for phase in OWN)
_WORTH_A_WORD = 0.05
"""How much slower the slowest rank must be; less is noise."""


@dataclass(frozen=True)
class RankLook:
    """At one rank, at one moment."""

    at: float
    status: Status
    process: ProcessFacts | None = None
    """None: it has ended."""
    cpu: float = 0.0
    """Seconds, with all processes below it."""
    windows: tuple[Window, ...] = ()
    ended: str = ""
    """How, if that is known: ``exit code 1``, ``SIGKILL``."""


@dataclass(frozen=True)
class Row:
    """What is told of one rank. Shares and paces are between the two looks, or else since the start."""

    rank: int
    pid: int
    is_alive: bool
    ended: str
    epoch: int
    step: int
    """As px.track counts, in this epoch."""
    updates: int
    """Steps of optimizers."""
    phase: str
    seconds: float
    """In this phase so far."""
    collective: Collective | None
    """That it is in."""
    waiting: float
    """Seconds for which it has waited for other ranks, up to now."""
    data: float | None
    """Share of the time in which it waited for its loader. None: it has not been in its loop."""
    compute: float | None
    wait: float | None
    """Share in which it waited for other ranks."""
    pace: float | None
    """Steps a second; None: not one."""
    cpu: float | None
    """1.5: one and a half cores."""
    resident: int | None
    """Bytes."""
    has_moved: bool
    """Between the two looks."""
    is_stopped: bool = False
    """By a signal, such as SIGSTOP."""


def row(before: RankLook, after: RankLook) -> Row:
    """Of one rank. Both may be the same look: then everything is since its start."""
    status, is_alive = after.status, after.process is not None
    is_one_look = before.at == after.at or before.status.pid != status.pid or not is_alive
    first = None if is_one_look else before
    end = after.at if is_alive else status.since
    elapsed = max(after.at - before.at, 1e-3) if first else max(end - status.started_at, 1e-3)
    updates = status.updates - (first.status.updates if first else 0)
    data, compute, wait = _shares(first, after)
    waits_since = status.blocked_since if is_alive else None
    return Row(
        *(status.rank, status.pid, is_alive, after.ended),
        *(status.epoch, status.step, status.updates, status.phase),
        seconds=max(0.0, after.at - status.since) if is_alive else 0.0,
        collective=status.open_collective,
        waiting=max(0.0, after.at - waits_since) if waits_since else 0.0,
        data=data,
        compute=compute,
        wait=wait,
        pace=updates / elapsed if updates else None,
        cpu=max(0.0, after.cpu - before.cpu) / elapsed if first else None,
        resident=after.process.resident if after.process else None,
        has_moved=first is not None and first.status.progress != status.progress,
        is_stopped=after.process is not None and after.process.state in "Tt",
    )


def _shares(before: RankLook | None, after: RankLook) -> tuple[float | None, float | None, float | None]:
    """Of the time in the loop: data, everything else of its own, waiting for others."""
    spent, waited = _spent(after)
    if before is not None:
        spent_before, waited_before = _spent(before)
        spent = {phase: spent[phase] - spent_before[phase] for phase in spent}
        waited = {phase: max(0.0, waited[phase] - waited_before[phase]) for phase in waited}
    total = sum(spent.values())
    if total <= 0:
        return None, None, None
    data = max(0.0, spent[PHASES[DATA]] - waited[PHASES[DATA]]) / total
    wait = min(1.0 - data, sum(waited.values()) / total)
    return data, 1.0 - data - wait, wait


def _spent(look: RankLook) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds in each phase of the loop, with the one it is in, and how many of these it waited."""
    status = look.status
    spent = {phase: status.seconds.get(phase, 0.0) for phase in _LOOP}
    waited = {phase: status.blocked.get(phase, 0.0) for phase in _LOOP}
    if look.process is not None and status.phase in spent:
        spent[status.phase] += max(0.0, look.at - status.since)
        if status.blocked_since is not None:
            waited[status.phase] += max(0.0, look.at - max(status.since, status.blocked_since))
    return spent, waited


def conclusion(rows: Sequence[Row], windows: Mapping[int, Sequence[Window]], seconds: float) -> str:
    """The last line: the slowest rank and why, or who waits for whom when nobody moves."""
    living = [one for one in rows if one.is_alive]
    if living and seconds > 0 and not any(one.has_moved for one in living):
        return _who_waits(living, seconds)
    found = straggler_detector.slowest(windows)
    if found is None:
        return "" if len(rows) < 2 else "no rank can be called the slowest before all have made 20 steps"
    rank, lag = found
    if lag.slower < _WORTH_A_WORD or lag.own - lag.usual < straggler_detector.NOTICEABLE / 10:
        return f"all ranks are about as fast: {straggler_text.milliseconds(lag.usual)} of own work a step"
    slower = straggler_text.percent(lag.slower)
    return f"slowest: rank {rank}, by {slower} ({straggler_text.work(lag)}), in {straggler_text.phases(lag)}"


def _who_waits(living: Sequence[Row], seconds: float) -> str:
    waiting = [one for one in living if one.collective is not None]
    others = [one for one in living if one.collective is None]
    text = f"no rank has made progress within {seconds:g} s"
    if not waiting:
        return f"{text}, and none waits for another"
    calls = sorted({_call(one) for one in waiting})
    if not others and len(calls) == 1:
        return f"{text}: all of them are in {calls[0]}"
    if not others:
        return f"{text}: they wait in different collectives, {', '.join(calls)}"
    wait = "waits" if len(waiting) == 1 else "wait"
    busy = " and ".join(f"rank {one.rank} ({_where(one)})" for one in others)
    return f"{text}: {ranks(waiting)} {wait} in {' and '.join(calls)} for {busy}"


def _where(one: Row) -> str:
    if one.is_stopped:
        return f"stopped by a signal in {one.phase}; kill -CONT {one.pid} resumes it"
    return f"in {one.phase} for {duration(one.seconds)}"


def _call(one: Row) -> str:
    assert one.collective is not None
    return call(one.collective)


def call(collective: Collective) -> str:
    """``all_reduce #12``; what has no number in its group is told without."""
    return f"{collective.op} #{collective.number}" if collective.number else collective.op


def ranks(rows: Sequence[Row]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' * (len(rows) > 1)} {', '.join(str(one.rank) for one in rows)}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
