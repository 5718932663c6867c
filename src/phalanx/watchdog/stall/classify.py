"""Why a run stands still: pure functions from what is known of each rank to who waits where, and for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.status.rank_record import MESSAGES, RankRecord
from phalanx.status.reading import CodeLine, Collective
from phalanx.watchdog.stall.rank_activity import RankActivity, rank_activity

_COMPARED = 8
"""Ranks that wait do mostly the same; a missing one is compared with some of them."""
_MUST_AGREE = ("all_reduce", "broadcast", "reduce")
"""Operations for which all ranks give as much of the same type."""


@dataclass(frozen=True)
class Waiting:
    """Ranks that wait in the same collective, which the same line of code has asked for."""

    ranks: tuple[int, ...]
    collective: Collective
    line: CodeLine | None
    is_open: bool = True
    """False: it has ended for them."""


@dataclass(frozen=True)
class Elsewhere:
    """Ranks that do not wait in a collective, and do the same."""

    ranks: tuple[int, ...]
    what: RankActivity
    example: RankRecord


@dataclass(frozen=True)
class Hang:
    """The whole picture."""

    kind: str
    """missing: some are waited for; desync: they have asked for different collectives; shapes: for the same one with
    different sizes or types; crossed: each waits for another that waits elsewhere; together: all wait in the same one;
    nobody: none waits"""
    quiet: float
    """Seconds since the last progress of any rank."""
    waiting: tuple[Waiting, ...]
    elsewhere: tuple[Elsewhere, ...]
    """Those that are waited for; if nobody waits, all."""
    hosts: tuple[str, ...] = ()
    differ: tuple[Waiting, ...] = ()
    """For desync and shapes: one side and another, from where they part."""
    unreachable: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Stores that cannot be reached: why, and the ranks that are connecting to them."""

    @property
    def culprits(self) -> tuple[int, ...]:
        return tuple(sorted(rank for group in self.elsewhere for rank in group.ranks))

    @property
    def picture(self) -> tuple[object, ...]:
        """The same as long as nothing has changed."""
        waiting = ((group.ranks, group.collective.op, group.collective.number) for group in self.waiting)
        return self.kind, tuple(waiting), tuple((group.ranks, *_where(group.what)) for group in self.elsewhere)


def _where(what: RankActivity) -> tuple[object, ...]:
    """A rank that computes is at another line all the time, but stays in its function."""
    line = what.line
    if line is None:
        return (what.kind,)
    return what.kind, line.file, line.function, 0 if what.kind == "computes" else line.line


def find_hang(records: Sequence[RankRecord]) -> Hang:
    """The records of all ranks, of which none has made progress for a while."""
    waiters = [record for record in records if record.waits_in]
    others = [record for record in records if not record.waits_in]
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


def _unreachable(records: Sequence[RankRecord]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for reason in sorted({record.unreachable for record in records} - {""}):
        yield reason, tuple(record.rank for record in records if record.unreachable == reason)


# ---- who waits for whom


def _missing(waiters: Sequence[RankRecord], records: Sequence[RankRecord]) -> set[int]:
    """Ranks that have not come to where others wait."""
    # Hundreds of ranks wait in the same collective: it is enough to ask for one of them.
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
    """The ranks of the collective's group; all, where the page does not say."""
    groups = waiter.status.groups if waiter.status else ()
    found = next((group.ranks for group in groups if group.name == waits.group), ())
    return found or tuple(record.rank for record in records)


def _has_come(record: RankRecord, waits: Collective) -> bool:
    """Whether this rank has asked for that collective, or a later one of its group."""
    page = record.status
    if page is None or record.exit_code is not None:
        return False
    if waits.op == "init_process_group":
        return record.has_joined or any(one.op == waits.op for one in page.collectives)
    asked = [one.number for one in record.asked(waits.group)]
    asked += [group.enqueued or 0 for group in page.groups if group.name == waits.group]
    return max(asked, default=-1) >= waits.number


def _awaited_peer(
    waiter: RankRecord, waits: Collective, ranks: tuple[int, ...], records: Sequence[RankRecord]
) -> Iterator[int]:
    if waits.peer is None:  # recv from anybody
        yield from (record.rank for record in records if record.rank in ranks and record.waits_in is None)
        return
    peer = ranks[waits.peer] if waits.group and waits.peer < len(ranks) else waits.peer
    record = next((record for record in records if record.rank == peer), None)
    theirs = record.waits_in if record else None
    answers = theirs is not None and theirs.op in MESSAGES and theirs.op != waits.op and theirs.group == waits.group
    if not (answers and theirs is not None and theirs.peer in (None, _number(waiter.rank, waits, ranks))):
        yield peer


def _number(rank: int, waits: Collective, ranks: tuple[int, ...]) -> int:
    """As the group counts; without a group, as all do."""
    return ranks.index(rank) if waits.group and rank in ranks else rank


# ---- ranks that have asked for different things


def _difference(records: Sequence[RankRecord]) -> tuple[Waiting, ...]:
    """The first collective of a group for which two ranks have called different functions, or given different sizes."""
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


# ---- ranks that do the same are told of together


def _waiting(waiters: Sequence[RankRecord]) -> Iterator[Waiting]:
    """Most ranks first."""
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
    """The line that asked for it. A rank that waits in it stands there, if its page does not know."""
    if collective.place is not None:
        return collective.place
    return record.main.shown if record.main and record.waits_in == collective else None


def _elsewhere(absent: Sequence[RankRecord], waiters: Sequence[RankRecord]) -> Iterator[Elsewhere]:
    groups: dict[tuple[object, ...], list[tuple[RankRecord, RankActivity]]] = {}
    for record in absent:
        what = rank_activity(record, waiters[:_COMPARED])
        line = (what.line.file, what.line.line) if what.line else None
        groups.setdefault((what.kind, line, what.left), []).append((record, what))
    for found in sorted(groups.values(), key=lambda group: (len(group), group[0][0].rank)):
        record, what = found[0]
        yield Elsewhere(tuple(sorted(record.rank for record, _ in found)), what, record)
