"""The table of `phalanx inspect`: a row for each rank, from two samples of it, and the line that names the slowest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.devices.gpu_state import GpuState
from phalanx.source_lines import shorten_path
from phalanx.status.layout import DATA, OWN, PHASES
from phalanx.status.reading import Collective, Status
from phalanx.status.windows import Window
from phalanx.system.procfs import ProcessFacts
from phalanx.watchdog.straggler import straggler_detector

_LOOP = tuple(PHASES[phase] for phase in OWN)
_NOTICEABLE = 0.05
"""The share by which the slowest rank must be slower than the others; less is noise."""
_WIDTH = 100
_LONG_WAIT = 0.5
"""Seconds of waiting from which on the line of code is printed."""


@dataclass(frozen=True)
class RankSample:
    """One rank at one moment."""

    at: float
    status: Status
    process: ProcessFacts | None = None
    """None: it has ended."""
    cpu: float = 0.0
    """Seconds, with all processes below it."""
    windows: tuple[Window, ...] = ()
    ended: str = ""
    """How it ended, if that is known: ``exit 1``, ``SIGKILL``."""
    gpu: GpuState | None = None


@dataclass(frozen=True)
class Row:
    """The row of one rank. Shares and paces are of the time between two samples, or else since the start."""

    rank: int
    pid: int
    is_alive: bool
    ended: str
    epoch: int
    step: int
    """Steps of this epoch, counted by px.track."""
    updates: int
    """Steps of optimizers."""
    phase: str
    seconds: float
    """Seconds in this phase so far."""
    collective: Collective | None
    """The collective that the rank is in."""
    waiting: float
    """Seconds for which it has waited for other ranks, up to now."""
    data: float | None
    """Share of the time spent waiting for the data loader. None: the rank has not been in its loop."""
    compute: float | None
    wait: float | None
    """Share of the time spent waiting for other ranks."""
    pace: float | None
    """Steps a second; None: there was not one."""
    cpu: float | None
    """Cores in use, such as 1.5."""
    resident: int | None
    """Bytes in memory."""
    has_moved: bool
    """It made progress between the two samples."""
    is_stopped: bool = False
    """A signal such as SIGSTOP has stopped it."""
    gpu: GpuState | None = None

    @property
    def call(self) -> str:
        """The collective that it is in: ``all_reduce #12``, or ``monitored_barrier``, which has no number."""
        if self.collective is None:
            return ""
        return f"{self.collective.op} #{self.collective.number}" if self.collective.number else self.collective.op


def row(before: RankSample, after: RankSample) -> Row:
    """Makes the row of one rank. When both are the same sample, everything is since its start."""
    status, process = after.status, after.process
    is_one_sample = before.at == after.at or before.status.pid != status.pid or process is None
    first = None if is_one_sample else before
    begin, end = before.at if first else status.started_at, after.at if process else status.since
    elapsed = max(end - begin, 1e-3)
    updates = status.updates - (first.status.updates if first else 0)
    waits_since = status.blocked_since if process else None
    data, compute, wait = _shares(first, after)
    return Row(
        *(status.rank, status.pid, process is not None, after.ended),
        *(status.epoch, status.step, status.updates, status.phase),
        seconds=max(0.0, after.at - status.since) if process else 0.0,
        collective=status.open_collective,
        waiting=max(0.0, after.at - waits_since) if waits_since else 0.0,
        data=data,
        compute=compute,
        wait=wait,
        pace=updates / elapsed if updates else None,
        cpu=max(0.0, after.cpu - before.cpu) / elapsed if first else None,
        resident=process.resident if process else None,
        has_moved=first is not None and first.status.progress != status.progress,
        is_stopped=process is not None and process.state in "Tt",
        gpu=after.gpu,
    )


def _shares(before: RankSample | None, after: RankSample) -> tuple[float | None, float | None, float | None]:
    """The shares of the time in the loop: data, everything else of its own, waiting for others."""
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


def _spent(sample: RankSample) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds in each phase of the loop, with the current one, and how many of these were spent waiting."""
    status = sample.status
    if status.device:  # by the device's clock: without timed steps, nothing is known
        own, wait, data = status.device_seconds
        return {"data": data, "other": own + wait}, {"data": 0.0, "other": wait}
    spent = {phase: status.seconds.get(phase, 0.0) for phase in _LOOP}
    waited = {phase: status.blocked.get(phase, 0.0) for phase in _LOOP}
    if sample.process is not None and status.phase in spent:
        spent[status.phase] += max(0.0, sample.at - status.since)
        if status.blocked_since is not None:
            waited[status.phase] += max(0.0, sample.at - max(status.since, status.blocked_since))
    return spent, waited


# ---- as text


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of the table, of at most 100 columns."""
    header = ["rank", "pid", "step", "phase", "steps/s", "data", "compute", "wait", "CPU", "memory", "in"]
    cells = [header, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [str.ljust if name in ("step", "phase", "in") else str.rjust for name in header]
    return [
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True))[
            :_WIDTH
        ].rstrip()
        for line in cells
    ]


def _cells(one: Row) -> list[str]:
    phase = "stopped" if one.is_stopped else one.phase
    return [
        str(one.rank),
        str(one.pid) if one.is_alive else one.ended or "ended",
        f"{one.epoch}/{one.step}" if one.step or one.epoch else str(one.updates),
        f"{phase} {duration(one.seconds)}" if one.is_alive and one.seconds >= 0.1 else phase,
        "–" if one.pace is None else f"{one.pace:.3g}",
        *("–" if share is None else f"{share * 100:.0f} %" for share in (one.data, one.compute, one.wait, one.cpu)),
        "–" if one.resident is None else f"{one.resident / 2**20:.0f} MiB",
        one.call,
    ]


def long_waits(rows: Sequence[Row]) -> list[str]:
    """The ranks that have waited for long, with the line of code; those that wait at the same line share one."""
    alike: dict[str, list[Row]] = {}
    for one in rows:
        if one.collective is not None and (one.waiting >= _LONG_WAIT or not one.is_alive):
            alike.setdefault(_waits_in(one, one.collective), []).append(one)
    lines = []
    for where, those in alike.items():
        longest = max(one.waiting for one in those)
        verb = f"wait{'s' * (len(those) == 1)} since {duration(longest)}" if longest else "ended"
        lines.append(f"{_rank_names(those)} {verb} in {where}")
    return lines


def _waits_in(one: Row, collective: Collective) -> str:
    what = f", {collective.size} × {collective.dtype}" if collective.dtype else ""
    peer = f" with rank {collective.peer} of its group" if collective.peer is not None else ""
    place = collective.place
    return f"{one.call}{what}{peer}" + (f", {shorten_path(place.file)}:{place.line}" if place is not None else "")


def conclusion(rows: Sequence[Row], windows: Mapping[int, Sequence[Window]], seconds: float) -> str:
    """The last line: the slowest rank and why, or who waits for whom when no rank makes progress."""
    living = [one for one in rows if one.is_alive]
    if living and seconds > 0 and not any(one.has_moved for one in living):
        return f"no rank has made progress within {seconds:g} s{_who_waits(living)}"
    found = straggler_detector.slowest(windows)
    if found is None:
        return (
            "" if len(rows) < 2 else "the slowest rank is not known before all have made 20 steps (on GPUs, with DDP)"
        )
    rank, lag = found
    if lag.slower < _NOTICEABLE or lag.own - lag.usual < straggler_detector.NOTICEABLE / 10:
        return f"all ranks are about as fast: {straggler_detector.milliseconds(lag.usual)} of own work a step"
    slower = straggler_detector.percent(lag.slower)
    return f"slowest: rank {rank}, by {slower} ({straggler_detector.work(lag)}), in {straggler_detector.phases(lag)}"


def _who_waits(living: Sequence[Row]) -> str:
    waiting = [one for one in living if one.call]
    others = [one for one in living if not one.call]
    calls = sorted({one.call for one in waiting})
    if not waiting:
        return ", and none waits for another"
    if not others:
        different = f"they wait in different collectives, {', '.join(calls)}"
        return f": {different if len(calls) > 1 else f'all of them are in {calls[0]}'}"
    wait = "waits" if len(waiting) == 1 else "wait"
    busy = " and ".join(f"rank {one.rank} ({_is_busy(one)})" for one in others)
    return f": {_rank_names(waiting)} {wait} in {' and '.join(calls)} for {busy}"


def _is_busy(one: Row) -> str:
    if one.is_stopped:
        return f"stopped by a signal in {one.phase}; kill -CONT {one.pid} resumes it"
    return f"in {one.phase} for {duration(one.seconds)}"


def _rank_names(rows: Sequence[Row]) -> str:
    return f"rank{'s' * (len(rows) > 1)} {', '.join(str(one.rank) for one in rows)}"


def duration(seconds: float) -> str:
    """``62.0 s``, ``12 min``, ``2.5 h``: short enough for a column."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
