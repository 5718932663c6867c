"""What the other nodes of a round say, and whether they live: the keeper's eyes.

Two threads: one asks the store, the other notices when that one gets no answer any more, for a cut link makes it wait
for many minutes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.errors import ForeignData
from phalanx.launch.docket import Clerk
from phalanx.launch.rendezvous import Page, Round

SILENCE = 10.0
"""Seconds without a sign of life after which a node counts as lost. A link may be away for a shorter time."""
BEAT = 0.25


def say_gone(store: Any, node: int) -> None:
    """This node's agent is dead. Whatever its keeper's lookout says until it ends is no sign of life any more."""
    store.set(f"gone/{node}", "its agent has ended or was killed")


class Lookout:
    """For one round. ``tell`` passes on what is seen; ``connect`` opens a connection for this thread alone."""

    def __init__(self, meeting: Round, connect: Callable[[], Any], tell: Callable[..., None]) -> None:
        self._round, self._connect, self._tell = meeting, connect, tell
        self.lost: dict[int, str] = {}
        self._page: Page | None = None
        self._clerk: Clerk | None = None
        self._has_handed_in = self._has_stopped = False
        self.last_page: Page | None = None
        """The one where all have said how they ended."""
        self._closing = threading.Event()
        self._answered_at = time.monotonic()
        for target in (self._watch, self._guard):
            threading.Thread(target=target, name=f"envoy{target.__name__}", daemon=True).start()

    @property
    def is_cut_off(self) -> bool:
        return self._round.server in self.lost

    @property
    def page(self) -> Page | None:
        """Of the attempt that runs."""
        return self._page

    def lose_store(self, text: str) -> None:
        self.lose(self._round.server, text)

    def turn_to(self, page: Page) -> None:
        """A new attempt begins."""
        self._has_handed_in = self._has_stopped = False
        is_judge = self._round.own.node == self._round.server
        self._page = page
        self._clerk = Clerk(
            is_judge,
            lambda what, **fields: self._tell("hearing", attempt=page.attempt, what=what, fields=fields),
        )

    def stop(self, why: str, for_good: bool) -> None:
        assert self._page is not None
        self._has_stopped = True
        self._page.stop(why, for_good)

    def hand_in(self, endings: list[dict[str, Any]]) -> None:
        assert self._page is not None
        self._page.hand_in(self._round.own.node, endings)
        self._has_handed_in = True

    def lose(self, node: int, text: str) -> None:
        if node not in self.lost and not self._closing.is_set():
            self.lost[node] = text
            self._tell("lost", node=node, text=text)

    def close(self) -> None:
        self._closing.set()

    # ---- the threads

    def _watch(self) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        beats = itertools.count()
        try:
            store = self._round.within(self._connect())
            while not self._closing.is_set():
                store.set(f"beat/{self._round.own.node}", str(next(beats)))
                self._look_after_nodes(store, seen)
                page = self._page
                if page is not None:
                    self._look_at_page(page.through(store), page)
                self._answered_at = time.monotonic()
                self._closing.wait(BEAT)
        except ForeignData as error:
            self.lose_store(str(error).rstrip("."))
        except RuntimeError as error:
            self.lose_store(f"its store does not answer any more ({str(error).splitlines()[0]})")

    def _look_after_nodes(self, store: Any, seen: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        for card in self._round.cards:
            key, gone = f"beat/{card.node}", f"gone/{card.node}"
            if card.node == self._round.own.node or card.node in self.lost:
                continue
            if store.check([gone]):
                self.lose(card.node, store.get(gone).decode(errors="replace"))
                continue
            beat = store.get(key) if store.check([key]) else b""
            before, since = seen.get(card.node, (None, now))
            if beat != before:
                seen[card.node] = beat, now
            elif now - since > SILENCE:
                self.lose(card.node, f"there has been no sign of life for {SILENCE:g} s")

    def _look_at_page(self, page: Page, shown: Page) -> None:
        found = None if self._has_stopped else page.stopped()
        if self._clerk is not None:
            self._clerk.look(page.docket)  # the reason to stop may be there, and was before it
        if found is not None:
            self._has_stopped = True
            self._tell("stop", why=found.why, for_good=found.for_good)
        if self._has_handed_in:
            endings = page.handed_in(set(self.lost))
            if endings is not None and self._page is shown:
                self._has_handed_in, self._page, self.last_page = False, None, shown
                page.sign_as_read(len(self.lost))
                self._tell("settled", endings={str(node): found for node, found in endings.items()})

    def _guard(self) -> None:
        while not self._closing.wait(1.0):
            if time.monotonic() - self._answered_at > SILENCE:
                self.lose_store(f"its store has not answered for {SILENCE:g} s")
