"""Decides why a run makes no progress: pure functions from what is known of each rank to who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.status.rank_record import MESSAGES, UNNAMED, RankRecord
from phalanx.status.reading import CodeLine, Collective
from phalanx.watchdog.stall.rank_activity import RankActivity, rank_activity

_COMPARED = 8
"""The number of waiting ranks that a missing one is compared with: they mostly do the same."""
_MUST_AGREE = ("all_reduce", "broadcast", "reduce")
"""Operations for which all ranks must give the same size and type."""


HangKind = Literal["missing", "desync", "shapes", "crossed", "together", "nobody"]
"""missing: some ranks are waited for; desync: ranks have called different collectives; shapes: the same one with
different sizes or types; crossed: each waits for another that waits elsewhere; together: all wait in the same one;
nobody: no rank waits for another"""


@dataclass(frozen=True)
class Waiting:
    """Ranks that wait in the same collective, called from the same line."""

    ranks: tuple[int, ...]
    collective: Collective
    line: CodeLine | None
    is_open: bool = True
    """False if it has ended for them."""


@dataclass(frozen=True)
class Elsewhere:
    """Ranks that do not wait in a collective, and all do the same."""

    ranks: tuple[int, ...]
    what: RankActivity
    example: RankRecord


@dataclass(frozen=True)
class Hang:
    """The state of all ranks of a run that makes no progress."""

    kind: HangKind
    quiet: float
    """Seconds since the last progress of any rank."""
    waiting: tuple[Waiting, ...]
    elsewhere: tuple[Elsewhere, ...]
    """The ranks that are waited for; if none waits, all."""
    hosts: tuple[str, ...] = ()
    differ: tuple[Waiting, ...] = ()
    """For desync and shapes: the ranks by the collective that they have called, where they first differ."""
    unreachable: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Stores that cannot be reached: the reason, and the ranks that connect to them."""

    @property
    def culprits(self) -> tuple[int, ...]:
        return tuple(sorted(rank for group in self.elsewhere for rank in group.ranks))

    @property
    def picture(self) -> tuple[object, ...]:
        """A value that is equal as long as the state of the ranks has not changed."""
        waiting = ((group.ranks, group.collective.op, group.collective.number) for group in self.waiting)
        return self.kind, tuple(waiting), tuple((group.ranks, *_where(group.what)) for group in self.elsewhere)


def _where(what: RankActivity) -> tuple[object, ...]:
    """Returns where a rank is. One that computes changes its line all the time, but not its function."""
    line = what.line
    if line is None:
        return (what.kind,)
    return what.kind, line.file, line.function, 0 if what.kind == "computes" else line.line


def find_hang(records: Sequence[RankRecord]) -> Hang:
    """Returns the state of a run in which no rank has made progress for a while."""
    waiters, others = _sides(records)
    missing = _missing(waiters, records)
    absent = [record for record in others if record.rank in missing]
    differ = _difference(records)
    if not waiters:
        kind, absent = "nobody", [one for one in others if one.exit_code is None] or others
    elif differ:
        kind = "desync" if len({side.collective.op for side in differ}) > 1 else "shapes"
    elif absent:
        kind = "missing"
    elif missing:
        kind = "crossed"
    elif others:
        kind, absent = "missing", others  # which of them cannot be known
    else:
        kind = "together"
    return Hang(
        kind=kind,
        quiet=min((record.quiet for record in records), default=0.0),
        waiting=tuple(_waiting(waiters)),
        elsewhere=tuple(_elsewhere(absent, waiters)),
        hosts=tuple(sorted({record.host for record in records})),
        differ=differ,
        unreachable=tuple(_unreachable(records)),
    )


def _sides(records: Sequence[RankRecord]) -> tuple[list[RankRecord], list[RankRecord]]:
    """Returns the ranks that wait for others, and those that they wait for, if only because of a busy device. But as
    long as a rank does something else on its host, a busy device may just wait for that rank."""
    waiters = [record for record in records if record.waits_in]
    others = [record for record in records if not record.waits_in]
    on_host = [record for record in others if record.device != "busy"]
    waiting = [record for record in waiters if record.device != "busy"]
    if on_host or not waiting:
        return waiters, on_host or others
    return waiting, [record for record in records if record not in waiting]


def _unreachable(records: Sequence[RankRecord]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for reason in sorted({record.unreachable for record in records} - {""}):
        yield reason, tuple(record.rank for record in records if record.unreachable == reason)


# ---- who waits for whom


def _missing(waiters: Sequence[RankRecord], records: Sequence[RankRecord]) -> set[int]:
    """Returns the ranks that have not come to where others wait."""
    # Hundreds of ranks may wait in the same collective: one of them is enough.
    cases = {(waits.group, waits.number, waits.op, waits.peer): one for one in waiters if (waits := one.waits_in)}
    messages = [one for one in waiters if one.waits_in and one.waits_in.op in MESSAGES]
    return {rank for waiter in (*cases.values(), *messages) for rank in _awaited(waiter, records)}


def _awaited(waiter: RankRecord, records: Sequence[RankRecord]) -> Iterator[int]:
    waits = waiter.waits_in
    assert waits is not None
    ranks = _members(waiter, waits, records)
    if waits.op in MESSAGES or (waits.peer is not None and not waits.group):
        yield from _awaited_peer(waiter, waits, ranks, records)
        return
    members = set(ranks)
    for record in records:
        if record.rank in members and not _has_come(record, waits):
            yield record.rank


def _members(waiter: RankRecord, waits: Collective, records: Sequence[RankRecord]) -> tuple[int, ...]:
    """Returns the ranks of the collective's group; all, where the page does not show them."""
    groups = waiter.status.groups if waiter.status else ()
    found = next((group.ranks for group in groups if group.name == waits.group), ())
    return found or tuple(record.rank for record in records)


def _has_come(record: RankRecord, waits: Collective) -> bool:
    """True if this rank has called that collective, or a later one of its group."""
    page = record.status
    if page is None or record.exit_code is not None:
        return False
    if waits.op == UNNAMED and not waits.group:  # on the device, where it has no number
        return record.waits_in is not None
    if waits.op == "init_process_group":
        return record.has_joined or any(one.op == waits.op for one in page.collectives)
    asked = [one.number for one in record.asked(waits.group)]
    asked += [group.enqueued or 0 for group in page.groups if group.name == waits.group]
    return max(asked, default=-1) >= waits.number


def _awaited_peer(
    waiter: RankRecord, waits: Collective, ranks: tuple[int, ...], records: Sequence[RankRecord]
) -> Iterator[int]:
    if waits.peer is None:  # recv from any rank
        yield from (record.rank for record in records if record.rank in ranks and record.waits_in is None)
        return
    peer = ranks[waits.peer] if waits.group and waits.peer < len(ranks) else waits.peer
    record = next((record for record in records if record.rank == peer), None)
    theirs = record.waits_in if record else None
    answers = theirs is not None and theirs.op in MESSAGES and theirs.op != waits.op and theirs.group == waits.group
    if not (answers and theirs is not None and theirs.peer in (None, _number(waiter.rank, waits, ranks))):
        yield peer


def _number(rank: int, waits: Collective, ranks: tuple[int, ...]) -> int:
    """Returns the rank's number in the group; without a group, its own number."""
    return ranks.index(rank) if waits.group and rank in ranks else rank


# ---- ranks that have called different collectives


def _difference(records: Sequence[RankRecord]) -> tuple[Waiting, ...]:
    """Returns the first collective of a group for which ranks have called different functions, or with other sizes."""
    asked: dict[tuple[str, int], list[tuple[RankRecord, Collective]]] = {}
    for record in records:
        for group in record.status.groups if record.status and record.exit_code is None else ():
            for one in record.asked(group.name):
                asked.setdefault((one.group, one.number), []).append((record, one))
    for _, calls in sorted(asked.items(), key=lambda item: item[0][1]):
        first = calls[0][1]
        if any(_differ(first, other) for _, other in calls):
            sides: dict[tuple[object, ...], list[tuple[RankRecord, Collective]]] = {}
            for record, one in calls:
                sides.setdefault((one.op, one.dtype, one.size), []).append((record, one))
            return tuple(_joined(side) for side in sides.values())
    return ()


def _differ(one: Collective, other: Collective) -> bool:
    if one.op != other.op:
        return True
    return one.op in _MUST_AGREE and (one.dtype, one.size) != (other.dtype, other.size)


# ---- ranks that do the same are one entry


def _waiting(waiters: Sequence[RankRecord]) -> Iterator[Waiting]:
    """Yields the waiting ranks by collective and line, the largest group first."""
    groups: dict[tuple[object, ...], list[tuple[RankRecord, Collective]]] = {}
    for record in waiters:
        waits = record.waits_in
        assert waits is not None
        line = _line_of(record, waits)
        where = (line.file, line.line) if line else None
        key = waits.group, waits.number, waits.op, waits.dtype, waits.size, waits.peer, where
        groups.setdefault(key, []).append((record, waits))
    for found in sorted(groups.values(), key=lambda group: (-len(group), group[0][0].rank)):
        yield _joined(found)


def _joined(found: Sequence[tuple[RankRecord, Collective]]) -> Waiting:
    record, collective = found[0]
    ranks = tuple(sorted(record.rank for record, _ in found))
    return Waiting(ranks, collective, _line_of(record, collective), collective.is_open)


def _line_of(record: RankRecord, collective: Collective) -> CodeLine | None:
    """Returns the line that called it. If the page does not have it, a rank that waits in it is at that line."""
    if collective.place is None and record.main and record.waits_in == collective:
        return record.main.shown
    return collective.place


def _elsewhere(absent: Sequence[RankRecord], waiters: Sequence[RankRecord]) -> Iterator[Elsewhere]:
    groups: dict[tuple[object, ...], list[tuple[RankRecord, RankActivity]]] = {}
    for record in absent:
        what = rank_activity(record, waiters[:_COMPARED])
        line = (what.line.file, what.line.line) if what.line else None
        groups.setdefault((what.kind, line, what.left), []).append((record, what))
    for found in sorted(groups.values(), key=lambda group: (len(group), group[0][0].rank)):
        record, what = found[0]
        yield Elsewhere(tuple(sorted(record.rank for record, _ in found)), what, record)
