"""The text about a run that makes no progress: never more than 15 lines, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.source_lines import clip
from phalanx.status.layout import those
from phalanx.status.rank_record import MESSAGES, UNNAMED, Child, RankRecord
from phalanx.status.reading import CodeLine
from phalanx.watchdog.stall.classify import Elsewhere, Hang, Waiting
from phalanx.watchdog.stall.rank_activity import RankActivity, helper_line

_MOST_WAITING, _MOST_ELSEWHERE = 3, 3
_DOES = {
    "sleeps": "sleeps",
    "child": "waits for a process that it has started",
    "input": "waits for input",
    "lock": "waits for a lock or another thread",
    "native lock": "waits for a lock or a thread inside native code",
    "file lock": "waits for a lock on a file",
    "sqlite": "waits for a lock on an SQLite database",
    "store": "waits for a key of a store",
    "queue": "waits for another process",
    "network": "waits for the network",
    "disk": "waits for a disk or a network file system",
    "driver": "waits in NVIDIA's driver, in the kernel",
    "device": "waits for its device, which has not finished its own work",
    "idle": "does nothing",
    "loader": "waits for its data loader",
    "finished": "has finished its script",
    "ended": "has ended",
    "unknown": "is somewhere else",
}


def verdict_lines(hang: Hang) -> list[str]:
    """Describes a hang. The first line is complete by itself, and there is room for two more."""
    lines = [f"no rank has made progress for {_seconds(hang.quiet)}{_TITLES[hang.kind]}"]
    known = [side.collective for side in hang.differ]
    waiting = [group for group in hang.waiting if group.collective not in known]
    shown = 1 if known else _MOST_WAITING
    lines += [f"  {_side(side)}" for side in hang.differ[:_MOST_WAITING]]
    lines += [f"  {_waits(group)}" for group in waiting[:shown]]
    lines += _rest([*hang.differ[_MOST_WAITING:], *waiting[shown:]], "waits in another one", "wait in others")
    for index, group in enumerate(hang.elsewhere[:_MOST_ELSEWHERE]):
        told = _elsewhere(group, hang)
        lines += [f"  {line}" for line in (told if index == 0 else told[:1])]
    lines += _rest(hang.elsewhere[_MOST_ELSEWHERE:], "is elsewhere", "are elsewhere")
    lines += _remark(hang)
    assert len(lines) <= 13, "the whole must fit on a small screen"
    return [clip(line) for line in lines]


def _rest(groups: Sequence[Waiting | Elsewhere], does: str, do: str) -> list[str]:
    ranks = [rank for group in groups for rank in group.ranks]
    return [f"  {those(ranks)} {do if len(ranks) > 1 else does}; see the stacks"] if ranks else []


def headline(hang: Hang) -> str:
    """Describes a hang in one sentence: for the line that announces a restart, and the end of the run."""
    if hang.differ:
        one, other = hang.differ[:2]
        return clip(f"a hang: {those(one.ranks)} called {_call(one)}, {those(other.ranks)} called {_call(other)}")
    waits = ""
    if hang.waiting:
        ranks = hang.waiting[0].ranks
        waits = f"{those(ranks)} {_wait(ranks)} in {_name(hang.waiting[0])}"
    if not hang.elsewhere:
        others = [f"{those(group.ranks)} {_wait(group.ranks)} in {_name(group)}" for group in hang.waiting[1:3]]
        return clip(f"a hang: {', '.join([waits, *others])}")
    group = hang.elsewhere[0]
    who = those(group.ranks) if len(group.ranks) == 1 else f"each of {those(group.ranks)}"
    where = f" at {_short(group.what.line)}" if group.what.line else ""
    return clip(f"a hang: {who} {_does(group)}{where}{' while ' * bool(waits)}{waits}")


def go_on(quiet: float) -> str:
    """When it is over."""
    return f"the ranks made progress again after {_seconds(quiet)}"


_TITLES = {
    "missing": "",
    "desync": ": they have called different collectives",
    "shapes": ": they have called a collective with different sizes or types",
    "crossed": ": each waits for another one that waits elsewhere",
    "together": ", and all of them are there",
    "nobody": ", and nobody waits for another",
}


def _remark(hang: Hang) -> list[str]:
    if hang.unreachable:
        reason, ranks = hang.unreachable[0]
        return [f"  {reason}, where {those(ranks)} {'connects' if len(ranks) == 1 else 'connect'} to"]
    if hang.kind == "together" and len(hang.hosts) > 1:
        return [f"  nobody is missing and nothing moves: is the network between {', '.join(hang.hosts[:8])} cut?"]
    if hang.kind == "together":
        return ["  nobody is missing and nothing moves"]
    return []


# ---- ranks that wait


def _waits(group: Waiting) -> str:
    return f"{those(group.ranks)} {_wait(group.ranks)} in {_name(group)}{_size(group)}{_place(group.line)}"


def _side(group: Waiting) -> str:
    """Describes one of several different calls for the same collective."""
    if group.is_open:
        return _waits(group)
    return f"{those(group.ranks)} called {_name(group)}{_size(group)}{_place(group.line)}, and continued"


def _call(group: Waiting) -> str:
    where = f" at {_short(group.line)}" if group.line else ""
    return f"{_name(group)}{_size(group)}{where}"


def _name(group: Waiting) -> str:
    one = group.collective
    if one.op in MESSAGES:
        towards = "to" if one.op == "send" else "from"
        peer = "any rank" if one.peer is None else f"rank {one.peer}"
        return f"{one.op} {towards} {peer}{'' if one.group in ('', '0') else f' of group {one.group}'}"
    if not one.group:  # init_process_group, rank_zero_first: they have no number
        return "a collective" if one.op == UNNAMED else one.op
    return f"{one.op} #{one.number}{'' if one.group == '0' else f' of group {one.group}'}"


def _size(group: Waiting) -> str:
    one = group.collective
    return f" ({one.size:,} {one.dtype})" if one.dtype else ""


# ---- ranks that do not


def _elsewhere(group: Elsewhere, hang: Hang) -> list[str]:
    """Describes what ranks do that are waited for, and what else is known of one of them."""
    record, is_one = group.example, len(group.ranks) == 1
    is_missing = "" if hang.kind == "nobody" else " is missing" if is_one else " are missing"
    what = f"{those(group.ranks)}{is_missing}: {'it' if is_one else 'each'} {_does(group)}{_where(group.what)}"
    others = "" if is_one else ", one of them"
    host = f" on {record.host}" if len(hang.hosts) > 1 else ""
    pid = f" (pid {record.vitals.pid})" if record.vitals is not None else ""
    evidence = ", ".join(_evidence(record))
    return [what, *_details(group.what, record), f"rank {record.rank}{others}{host}{pid}: {evidence}"]


def _does(group: Elsewhere) -> str:
    """Returns the words after "it" or "each"."""
    what, record = group.what, group.example
    left = f"has left the loop of {_short(what.left)}{_steps(record)} and " if what.left else ""
    return left + (_by_vitals(what.kind, record) or _DOES[what.kind])


def _by_vitals(kind: str, record: RankRecord) -> str | None:
    vitals = record.vitals
    if vitals is None:
        return f"has ended with exit code {record.exit_code}" if kind == "ended" else None
    if kind == "computes":
        return f"computes at {vitals.cpu * 100:.0f} % CPU"
    if kind == "stopped":
        return _stopped(vitals.pid)
    if kind == "traced":
        return f"is held by a debugger (pid {vitals.pid})"
    if kind == "swapped":
        pages = f"{vitals.faults:.0f} pages a second come back"
        return f"is swapped out: {_gib(vitals.swapped)} are on disk, {_gib(vitals.resident)} in memory, {pages}"
    return None


def _stopped(pid: int) -> str:
    return f"is stopped by a signal (SIGSTOP; kill -CONT {pid} resumes it)"


def _where(what: RankActivity) -> str:
    line = what.line
    if line is None:
        return ""
    function = f" in {line.function}" if line.function != "<module>" else ""
    return f"{function} at {_short(line)}{_text(line)}"


def _details(what: RankActivity, record: RankRecord) -> list[str]:
    death = record.thread_death
    if death is not None:
        where = f" at {death.place}" if death.place else ""
        return [f"its thread {death.name} has died: {death.error}{where}", *_reasons(what, record)]
    return _reasons(what, record)


def _reasons(what: RankActivity, record: RankRecord) -> list[str]:
    if what.helper is not None:
        return [_helper(what.helper, "worker" if what.kind == "loader" else "process")]
    if what.kind == "file lock" and record.vitals is not None and record.vitals.lock_holder:
        return [f"{record.vitals.lock_holder} holds it"]
    if what.kind == "finished" and record.vitals is not None:
        if what.handler is not None:
            where = "a destructor" if what.handler.function == "__del__" else "an atexit handler"
            return [
                f"its process (pid {record.vitals.pid}) has not ended: its main thread is in {where}{_at(what.handler)}"
            ]
        who = f"a thread of it is{_at(what.holder)}" if what.holder else "one of its threads may keep it"
        return [f"its process (pid {record.vitals.pid}) has not ended: {who}"]
    if what.holder is not None:
        return [f"another thread of rank {record.rank} may hold it{_place(what.holder).replace(',', ':', 1)}"]
    return []


def _at(line: CodeLine) -> str:
    return f" at {_short(line)}{_text(line)}"


def _helper(child: Child, noun: str) -> str:
    vitals, line = child.vitals, helper_line(child)
    who = f"its {noun} (pid {vitals.pid})"
    if vitals.state in "Tt":
        return f"{who} {_stopped(vitals.pid)}"
    if line is None:
        return f"{who}: {child.command}" if noun == "process" else f"{who} waits too"
    busy = f" (CPU {vitals.cpu * 100:.0f} %)" if vitals.computes else ""
    return f"{who}{busy} is{_place(line).replace(',', ' at', 1)}"


def _evidence(record: RankRecord) -> list[str]:
    facts = [f"last progress {_seconds(record.quiet)} ago"]
    page, vitals = record.status, record.vitals
    if page is not None:
        if page.phase not in ("started", "other"):
            facts.append(f"in phase {page.phase}")
        if page.step:
            facts.append(f"step {page.step}" + f" of epoch {page.epoch}" * bool(page.epoch))
        elif page.updates:
            facts.append(f"{page.updates} optimizer step{'s' * (page.updates > 1)}")
    if vitals is not None:
        facts.append(f"CPU {vitals.cpu * 100:.0f} %")
        if vitals.moves:
            facts.append(f"moves {vitals.bytes_moved / 1e6:.1f} MB/s")
    if record.gpu is not None:
        facts.append(str(record.gpu))
    return facts


def _steps(record: RankRecord) -> str:
    count = (record.status.step or record.status.updates) if record.status else 0
    return f" after {count} step{'s' * (count > 1)}" if count else ""


# ---- parts of sentences


def _wait(ranks: Sequence[int]) -> str:
    return "wait" if len(ranks) > 1 else "waits"


def _place(line: CodeLine | None) -> str:
    """Returns a comma, file, line, function and text."""
    if line is None:
        return ""
    function = f" in {line.function}" if line.function != "<module>" else ""
    return f", {_short(line)}{function}{_text(line)}"


def _short(line: CodeLine) -> str:
    return f"{line.file}:{line.line}"


def _text(line: CodeLine) -> str:
    return f": {line.source}" if line.source else ""


def _seconds(value: float) -> str:
    if value < 10:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


def _gib(value: int) -> str:
    return f"{value / 2**30:.1f} GiB"
