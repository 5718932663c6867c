"""Collects all that can be known of the ranks of this node, on its own thread: that takes a second or two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
"""If torch's compiler is loaded, torch may take seconds to find the line that has called a collective."""
_MOST_CHILDREN = 16


class SnapshotCollector:
    """Completes the records of ranks that make no progress with their pages and stacks."""

    def __init__(self, records: Sequence[RankRecord], directory: Path, done: Callable[[], None]) -> None:
        """``done`` is called on the thread, when the records are complete."""
        self.records, self._directory, self._done = list(records), directory, done
        self.trouble: str | None = None
        """The reason why the records are not complete."""
        self._thread = threading.Thread(target=self._collect, name="collector", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits a moment for the thread, so that no process that it has started is left over."""
        self._thread.join(_LAST_WORDS)

    def _collect(self) -> None:
        try:
            self.records = self._completed()
        except Exception as error:  # noqa: BLE001 (what was known before is better than nothing)
            self.trouble = f"{type(error).__name__}: {error}"
        self._done()

    def _completed(self) -> list[RankRecord]:
        deadline = time.monotonic() + _LONGEST
        with ThreadPoolExecutor(min(16, len(self.records))) as pool:
            records = list(pool.map(self._with_page, self.records))
        wanted = [
            Wanted(
                record.vitals.pid,
                _children_of_interest(record),
                layout.status_path(self._directory, record.rank),
                layout.stacks_path(self._directory, record.rank),
            )
            for record in records
            if record.vitals is not None
        ]
        found = stacks_of(wanted, deadline)
        return [
            messages.replace(
                record,
                threads=found.get(record.vitals.pid, ()) if record.vitals else (),
                children=tuple(
                    messages.replace(child, threads=found.get(child.vitals.pid, ())) for child in record.children
                ),
            )
            for record in records
        ]

    def _with_page(self, record: RankRecord) -> RankRecord:
        """Returns the record with the page of now. A rank that cannot answer keeps the page that it had."""
        path = layout.status_path(self._directory, record.rank)
        if record.vitals is not None and record.vitals.state not in "Tt":
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
    """Adds the text of a line. To be called on the rank's node, which has the file and the working directory."""
    return messages.replace(line, file=shorten_path(line.file), source=source_of(line.file, line.line))


def _children_of_interest(record: RankRecord) -> tuple[int, ...]:
    """Returns the processes below a rank whose stacks matter: none, if it waits for other ranks."""
    return () if record.waits_in else tuple(child.vitals.pid for child in record.children[:_MOST_CHILDREN])
