"""The keeper's eyes on the other nodes, with a store in this process."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed import HashStore

from phalanx.launch import lookout
from phalanx.launch.lookout import Lookout
from phalanx.launch.rendezvous import NodeCard, Round


def test_a_node_that_is_gone_is_lost_at_once_although_its_keeper_still_beats() -> None:
    store: Any = HashStore()
    cards = tuple(NodeCard(node, f"node{node}", "", 1, 2, "2", 0, "", "", "", "") for node in (0, 1))
    meeting = Round("run", cards[0], cards)
    lost, told = threading.Event(), []

    def tell(event: str, **fields: Any) -> None:
        told.append((event, fields))
        lost.set()

    watching = Lookout(meeting, lambda: store, tell)
    within = meeting.within(store)
    within.set("beat/1", "1")
    lookout.say_gone(within, 1)
    within.set("beat/1", "2")
    assert lost.wait(lookout.SILENCE / 2)
    assert told == [("lost", {"node": 1, "text": "its agent has ended or was killed"})]
    watching.close()
    for thread in threading.enumerate():
        if thread.name.startswith("envoy"):
            thread.join()
