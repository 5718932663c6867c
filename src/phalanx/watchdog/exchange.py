"""The way of a node's watchdogs to those of the other nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

Topic = Literal["stall", "pace"]


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
        """``judge``: the node that compares what all report; ``lost``: nodes that are gone, as it grows; ``publish``:
        to all nodes, or to the judge alone."""
        self.judge, self.is_judge = judge, own == judge
        self.publish = publish
        self.receivers: dict[Topic, Callable[[int, bytes], None]] = {}
        """What is called with what another node has published."""
        self._others, self._lost = set(nodes) - {own}, lost

    @property
    def others(self) -> list[int]:
        """The other nodes that are not lost."""
        return sorted(self._others - set(self._lost))
