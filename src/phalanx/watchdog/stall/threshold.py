"""Decides when a run is stalled: a pure function from what each rank does to a number of seconds.

A false report is worse than a late one. So a rank that computes, reads or writes gets much longer than one that does
nothing, and a run in which no rank waits for another is not stalled as long as one of them works.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.messages import Rank, Record
from phalanx.status.rank_record import RankRecord

_RUNS = ("busy", "waits")  # while its device does, a host that waits for it may spin
WHILE_WORKING = 4
WHILE_STARTING = 10
"""Before the first step of any rank: compiling, downloading, warm-up."""
WHILE_ENDING = 10
"""After a rank's last line: what is left to do may take long, and no rank waits for it."""


class Observation(Record, frozen=True):
    """The state of one rank, as far as the threshold depends on it."""

    rank: Rank
    waits_in: tuple[str, int, str, int] | None = None
    """The collective it waits in: group, number, operation, size."""
    has_joined: bool = True
    has_stepped: bool = True
    phase: str = "other"
    works: bool = False
    """True if it, or a process that it has started, computes, reads or writes, or if its busy GPU may compute."""
    moves: bool = False
    """True if it reads or writes."""
    device_runs: bool = False
    """True if its device has not come to the end of its own work: it computes, or it is stuck."""
    is_stopped: bool = False
    has_ended: bool = False
    """True if its script has ended."""
    is_gone: bool = False
    """True if its process has ended too."""


def observation_of(record: RankRecord) -> Observation:
    page, waits = record.status, record.waits_in
    everything = [one for one in (record.vitals, *(child.vitals for child in record.children)) if one is not None]
    may_compute = record.device == "busy" and record.gpu is not None and record.gpu.is_busy and not record.gpu.may_wait
    return Observation(
        rank=record.rank,
        waits_in=(waits.group, waits.number, waits.op, waits.size) if waits else None,
        has_joined=record.has_joined,
        has_stepped=page is not None and (page.updates > 0 or page.step > 0),
        phase=page.phase if page else "started",
        works=any(one.works for one in everything) if record.device not in _RUNS else may_compute,
        moves=any(one.moves for one in everything),
        device_runs=record.device == "busy",
        is_stopped=record.vitals is not None and record.vitals.state in "Tt",
        has_ended=record.exit_code is not None or (page is not None and page.phase == "done"),
        is_gone=record.exit_code is not None,
    )


def stall_threshold(sightings: Sequence[Observation], stall_after: float) -> float | None:
    """Returns the seconds without progress of any rank after which these are stalled; None if they never are."""
    waiting = [one for one in sightings if one.waits_in]
    others = [one for one in sightings if not one.waits_in]
    if len(sightings) < 2 or not any(one.has_joined or one.waits_in for one in sightings):
        return None  # ranks that never join may sleep as long as they like
    if any(one.phase in ("checkpoint", "compile") and one.works for one in others):
        return None
    if not waiting:
        return _threshold_without(others, stall_after)
    if any((one.works or one.device_runs) and not one.has_ended for one in others):
        return stall_after * (WHILE_WORKING if any(one.has_stepped for one in sightings) else WHILE_STARTING)
    return stall_after if others else _threshold_within(waiting, stall_after)


def _threshold_within(waiting: Sequence[Observation], stall_after: float) -> float | None:
    """The threshold if all ranks are in a collective: the same one may be slow, and a host is ahead of its device."""
    is_same = len({one.waits_in for one in waiting}) == 1
    if is_same and any(one.moves for one in waiting):
        return None
    works = any(one.works and (is_same or one.device_runs) for one in waiting)
    runs = any(one.device_runs for one in waiting)
    return stall_after * (WHILE_STARTING if works else WHILE_WORKING if runs else 1)


def _threshold_without(others: Sequence[Observation], stall_after: float) -> float | None:
    """The threshold if no rank waits for another."""
    if any(one.works and not one.device_runs for one in others) or all(one.is_gone for one in others):
        return None
    if any(one.device_runs for one in others):  # a GPU that waits in NCCL may seem to compute, so there is a limit
        return stall_after * (WHILE_STARTING if any(one.works for one in others) else WHILE_WORKING)
    return stall_after * (WHILE_ENDING if any(one.has_ended for one in others) else 1)
