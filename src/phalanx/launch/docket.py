"""What the nodes write into the store about ranks that stand still or are slow; how a keeper reads it for its agent.

Two counters say whether there is anything new: one for the judge, which hears all nodes, and one for everybody. So a
node asks the store for two numbers at most as long as all is well.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx import plain
from phalanx.errors import ForeignData

_STORE = "the store where the nodes meet"
_Record = dict[str, Any]


class Docket:
    """Of one attempt."""

    def __init__(self, store: Any, prefix: str, nodes: int) -> None:
        self._store, self._prefix, self._nodes = store, prefix, nodes

    def _key(self, name: str) -> str:
        return f"{self._prefix}/stall/{name}"

    def _write(self, name: str, content: object, reader: str) -> None:
        """What is written is there before anybody is told of it."""
        self._store.set(self._key(name), json.dumps(content))
        self._store.add(self._key(f"news for {reader}"), 1)

    def _read(self, name: str, shape: Any) -> Any:
        """None: nobody has written it, or somebody else. The agent checks what a record holds: it has the type."""
        key = self._key(name)
        with contextlib.suppress(ForeignData):  # what explains a run is no reason to end it
            return plain.decode(self._store.get(key), shape, _STORE) if self._store.check([key]) else None

    def news(self, reader: str) -> int:
        """``judge`` or ``all``: grows with everything that is written for them."""
        return self._store.add(self._key(f"news for {reader}"), 0)

    def report(self, node: int, report: Mapping[str, Any] | None) -> None:
        self._write(f"report/{node}", report, "judge")

    def reports(self) -> dict[str, Any]:
        return {str(node): self._read(f"report/{node}", _Record | None) for node in range(self._nodes)}

    def call(self, number: int) -> None:
        self._write("called", number, "all")

    def called(self) -> int:
        return self._read("called", int) or 0

    def testify(self, number: int, node: int, records: Sequence[Mapping[str, Any]]) -> None:
        self._write(f"testimony/{number}/{node}", records, "judge")

    def testimonies(self, number: int) -> dict[str, Any]:
        found = {str(node): self._read(f"testimony/{number}/{node}", list[_Record]) for node in range(self._nodes)}
        return {node: records for node, records in found.items() if records is not None}

    def send(self, node: int, tidings: Mapping[str, Any]) -> None:
        """Of the pace of a node's ranks. They are counted before the judge is told that there is something new."""
        self._store.set(self._key(f"tidings/{node}"), json.dumps(tidings))
        self._store.add(self._key(f"sent by {node}"), 1)
        self._store.add(self._key("news for judge"), 1)

    def sent(self, node: int) -> int:
        """How often."""
        return self._store.add(self._key(f"sent by {node}"), 0)

    def tidings(self, node: int) -> Any:
        return self._read(f"tidings/{node}", _Record)

    @property
    def nodes(self) -> range:
        return range(self._nodes)

    def announce(self, announcement: Mapping[str, Any]) -> None:
        number = self._store.add(self._key("announcements"), 1)
        self._write(f"announcement/{number}", announcement, "all")

    def announcement(self, number: int) -> dict[str, Any] | None:
        return self._read(f"announcement/{number}", _Record)


class Clerk:
    """Reads the docket of one attempt for one node."""

    def __init__(self, is_judge: bool, tell: Callable[..., None]) -> None:
        self._is_judge, self._tell = is_judge, tell
        self._seen = {"judge": 0, "all": 0}
        self._announced = 0
        self._testified: set[tuple[int, str]] = set()
        self._sent: dict[int, int] = {}

    def look(self, docket: Docket) -> None:
        if self._is_judge and self._has_news(docket, "judge"):
            self._tell("reports", reports=docket.reports())
            self._pass_on_testimonies(docket)
            self._pass_on_tidings(docket)
        if not self._is_judge and self._has_news(docket, "all"):
            self._tell("called", number=docket.called())
            while (announcement := docket.announcement(self._announced + 1)) is not None:
                self._announced += 1
                self._tell("announced", announcement=announcement)

    def _has_news(self, docket: Docket, reader: str) -> bool:
        before, self._seen[reader] = self._seen[reader], docket.news(reader)
        return self._seen[reader] != before

    def _pass_on_testimonies(self, docket: Docket) -> None:
        number = docket.called()
        for node, records in docket.testimonies(number).items() if number else ():
            if (number, node) not in self._testified:
                self._testified.add((number, node))
                self._tell("testimony", number=number, node=int(node), records=records)

    def _pass_on_tidings(self, docket: Docket) -> None:
        for node in docket.nodes:
            sent = docket.sent(node)
            if sent != self._sent.get(node, 0):
                self._sent[node] = sent
                self._tell("tidings", node=node, tidings=docket.tidings(node))
