"""Connects the watchdogs of a node with those of the other nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

Topic = Literal["stall", "pace", "stop"]


class Exchange:
    """Carries the watchdogs' messages in one attempt, as bytes. Without other nodes it carries none."""

    def __init__(
        self,
        own: int = 0,
        judge: int = 0,
        nodes: Collection[int] = (0,),
        lost: Collection[int] = (),
        publish: Callable[[Topic, bytes, bool], None] = lambda topic, body, to_all: None,
    ) -> None:
        """``judge``: the node that decides for all; ``lost``: nodes that are gone, a collection that grows;
        ``publish``: sends to all nodes, or to the judge alone."""
        self.judge, self.is_judge = judge, own == judge
        self.publish = publish
        self.receivers: dict[Topic, Callable[[int, bytes], None]] = {}
        """The functions that get the messages of other nodes."""
        self._others, self._lost = set(nodes) - {own}, lost

    @property
    def others(self) -> list[int]:
        """The other nodes that are not lost."""
        return sorted(self._others - set(self._lost))
