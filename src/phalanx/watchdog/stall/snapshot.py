"""Collects all that can be known of the ranks of this node, on a thread of its own: it takes a second or two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from phalanx import messages
from phalanx.source_lines import shorten_path, source_of
from phalanx.status import layout, reading
from phalanx.status.rank_record import UNNAMED, RankRecord
from phalanx.status.reading import CodeLine
from phalanx.store import tcp_store
from phalanx.watchdog.stall.stack_dump import Wanted, stacks_of

_LONGEST = 6.0
_LAST_WORDS = 2.0
_ANSWER = 0.5
_SLOW_ANSWER = 3.0
"""If torch's compiler is there, torch may take seconds to find the line that has asked for a collective."""
_MOST_CHILDREN = 16


@dataclass(frozen=True)
class StalledRank:
    """A rank as it is known before the inquiry."""

    record: RankRecord
    pid: int | None
    """None: it has ended."""


class SnapshotCollector:
    """Into why they stand still."""

    def __init__(self, subjects: Sequence[StalledRank], directory: Path, done: Callable[[], None]) -> None:
        """``done`` is called on the thread, when the records are there."""
        self._subjects, self._directory, self._done = subjects, directory, done
        self.records: list[RankRecord] | None = None
        self.trouble: str | None = None
        """Why they are not complete."""
        self._thread = threading.Thread(target=self._collect, name="collector", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Nobody waits for what it finds any more, but a process that it has started should not be left alone."""
        self._thread.join(_LAST_WORDS)

    def _collect(self) -> None:
        """Whatever happens: what was known before is better than nothing."""
        records = [subject.record for subject in self._subjects]
        try:
            records = self._completed()
        except Exception as error:  # noqa: BLE001 (there is nobody above this but the end of the thread)
            self.trouble = f"{type(error).__name__}: {error}"
        self.records = records
        self._done()

    def _completed(self) -> list[RankRecord]:
        deadline = time.monotonic() + _LONGEST
        with ThreadPoolExecutor(min(16, len(self._subjects))) as pool:
            records = list(pool.map(self._with_page, self._subjects))
        wanted = [
            Wanted(
                subject.pid,
                _children_of_interest(record),
                layout.status_path(self._directory, record.rank),
                layout.stacks_path(self._directory, record.rank),
            )
            for subject, record in zip(self._subjects, records, strict=True)
            if subject.pid is not None
        ]
        found = stacks_of(wanted, deadline)
        return [
            messages.replace(
                record,
                threads=found.get(subject.pid or 0, ()),
                children=tuple(
                    messages.replace(child, threads=found.get(child.vitals.pid, ())) for child in record.children
                ),
            )
            for subject, record in zip(self._subjects, records, strict=True)
        ]

    def _with_page(self, subject: StalledRank) -> RankRecord:
        """As new as can be. A rank that cannot answer has the page that it had."""
        record = subject.record
        path = layout.status_path(self._directory, record.rank)
        if subject.pid is not None and record.vitals is not None and record.vitals.state not in "Tt":
            try:
                is_slow = record.waits_in is not None and record.waits_in.op == UNNAMED
                reading.ask(path, _SLOW_ANSWER if is_slow else _ANSWER)
            except (OSError, ValueError):  # it has none, or an empty one
                return record
        page = reading.read(path)
        if page is None:
            return record
        lines = {one.place: _with_source(one.place) for one in page.collectives if one.place is not None}
        collectives = (messages.replace(one, place=lines[one.place]) if one.place else one for one in page.collectives)
        unreachable = tcp_store.why_unreachable(page.connecting, _ANSWER) if page.connecting else ""
        known = messages.replace(page, collectives=tuple(collectives))
        return messages.replace(record, status=known, unreachable=unreachable)


def _with_source(line: CodeLine) -> CodeLine:
    """On this node, which has the file and the working directory."""
    return messages.replace(line, file=shorten_path(line.file), source=source_of(line.file, line.line))


def _children_of_interest(record: RankRecord) -> tuple[int, ...]:
    """Of a rank that waits for other ranks, none."""
    return () if record.waits_in else tuple(child.vitals.pid for child in record.children[:_MOST_CHILDREN])
