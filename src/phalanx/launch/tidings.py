"""What a node says of the pace of its ranks to the one that compares those of all nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx import plain
from phalanx.status import Window
from phalanx.watchdog.straggler.conditions import Conditions


@dataclass(frozen=True)
class Tidings:
    """Since the last ones, a few seconds ago."""

    host: str
    windows: Mapping[int, tuple[Window, ...]]
    """Of each rank that lives."""
    conditions: Mapping[int, Conditions]
    """Under which it worked, as far as that is known."""

    def to_fields(self) -> dict[str, Any]:
        """For JSON. They are many, so the phases are named once."""
        phases = next((list(window.seconds) for found in self.windows.values() for window in found), [])
        return {
            "host": self.host,
            "phases": phases,
            "windows": {
                rank: [[window.updates, *(round(window.seconds[phase], 6) for phase in phases)] for window in found]
                for rank, found in self.windows.items()
            },
            "conditions": {rank: dataclasses.asdict(found) for rank, found in self.conditions.items()},
        }

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Tidings:
        found = plain.fit(fields, _Sent, "what another node says of the pace of its ranks")
        windows = {
            rank: tuple(
                Window(int(updates), dict(zip(found.phases, seconds, strict=False))) for updates, *seconds in rows
            )
            for rank, rows in found.windows.items()
        }
        return Tidings(found.host, windows, found.conditions)


@dataclass(frozen=True)
class _Sent:
    """As it is written."""

    host: str
    phases: tuple[str, ...]
    windows: Mapping[int, tuple[tuple[float, ...], ...]]
    """Of each window the number of its last step, and the seconds of each phase."""
    conditions: Mapping[int, Conditions]
