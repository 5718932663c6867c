"""The keeper's part in a run of several nodes: it meets the others for its agent, and passes on what they say.

A store behind a cut link answers after many minutes, or never. So the thread that listens to the agent never asks it
anything: one does what the agent has ordered, one looks what the other nodes say, and one notices when that one gets
no answer any more.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from queue import SimpleQueue
from typing import Any

from phalanx import join, stores
from phalanx.errors import PhalanxError
from phalanx.launch.channel import Channel
from phalanx.launch.rendezvous import Book, NodeCard, Page, wait_for

SILENCE = 10.0
"""Seconds without a sign of life after which a node counts as lost. A link may be away for a shorter time."""
_BEAT = 0.25
_LAST_WORDS = 5.0
_VERDICT_STAYS = 1.0
_GONE = "gone"


class Envoy:
    """Of one node. Everything it hears goes to the agent as an event."""

    def __init__(self, channel: Channel, listener: socket.socket | None) -> None:
        self._channel, self._listener = channel, listener
        self._sending = threading.Lock()
        self._store: Any = None
        self._hosted: Any = None
        self._workers: tuple[socket.socket, Any] | None = None
        """The socket of the workers' store and the store, on the first node."""
        self._lost: dict[int, str] = {}
        self._page: Page | None = None
        self._has_handed_in = False
        self._last_page: Page | None = None
        self._orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._has_obeyed = threading.Event()
        self._closing = threading.Event()
        self._answered_at = time.monotonic()

    def serve(self) -> None:
        """Until the agent says goodbye, or dies, which the other nodes are told."""
        self._start(self._obey)
        order: dict[str, Any] = {}
        while order.get("op") != "bye":
            received = self._channel.receive()
            order = received[0] if received is not None else {"op": "bye", "gone": True}
            self._orders.put(order)
        # It is the last order. If the store has stopped answering, this is not the place to wait for it.
        self._has_obeyed.wait(_LAST_WORDS)
        self._closing.set()
        self._tell("goodbye")

    def _obey(self) -> None:
        order: dict[str, Any] = {}
        while order.get("op") != "bye":
            order = self._orders.get()
            try:
                getattr(self, f"_{order['op']}")(order)
            except PhalanxError as error:
                if self._hosted is not None:  # a moment, so that the others can read it too
                    wait_for(self._store, "everyone has read the verdict", _VERDICT_STAYS)
                self._tell("refused", text=str(error))
            except RuntimeError as error:
                self._lose(0, f"its store does not answer ({str(error).splitlines()[0]})")
        self._has_obeyed.set()

    # ---- what the agent asks for

    def _meet(self, message: dict[str, Any]) -> None:
        self._own = NodeCard(**message["card"])
        host, port = message["endpoint"]
        if self._listener is not None:
            self._hosted = stores.serve(host, self._listener, timeout=60.0)
        self._connect = lambda: join.open_store(f"tcp://{host}:{port}", 1, 2, True, message["timeout"])[0]
        self._store = self._connect()
        book = Book(self._store, self._own)
        book.sign()
        cards = book.await_verdict(
            message["timeout"], lambda came, waited: self._tell("waiting", came=came, waited=waited)
        )
        self._tell("met", cards=[vars(card) for card in cards])
        self._cards = cards
        self._beats = itertools.count()
        self._start(self._watch, self._guard)

    def _attempt(self, message: dict[str, Any]) -> None:
        number = message["number"]
        page = Page(self._store, number, len(self._cards))
        if self._listener is not None:
            address = self._own.address
            if self._workers is not None:
                self._workers[0].close()
            self._workers = None  # its connections close before the next one is there
            listener = socket.create_server((address, 0), backlog=socket.SOMAXCONN)
            self._workers = listener, stores.serve(address, listener, timeout=60.0)
            page.open_at(address, listener.getsockname()[1])
        self._page, self._has_handed_in, self._has_stopped = page, False, False
        where = None
        while where is None and 0 not in self._lost:
            where = page.where(_BEAT)
        if where is not None:
            self._tell("master", address=where[0], port=where[1])

    def _stop(self, message: dict[str, Any]) -> None:
        assert self._page is not None
        self._has_stopped = True
        self._page.stop(message["why"])

    def _endings(self, message: dict[str, Any]) -> None:
        assert self._page is not None
        self._page.hand_in(self._own.node, message["endings"])
        self._has_handed_in = True

    # ---- what the others say

    def _watch(self) -> None:
        """Speaks with the store, through a connection of its own: a wait on one blocks whoever else would use it."""
        store = self._connect()
        seen: dict[int, tuple[bytes, float]] = {}
        try:
            while not self._closing.is_set():
                self._look_after_nodes(store, seen)
                page = self._page
                if page is not None:
                    self._look_at_page(page.through(store), page)
                self._answered_at = time.monotonic()
                self._closing.wait(_BEAT)
        except RuntimeError as error:
            if not self._closing.is_set():
                self._lose(0, f"its store does not answer any more ({str(error).splitlines()[0]})")

    def _look_after_nodes(self, store: Any, seen: dict[int, tuple[bytes, float]]) -> None:
        store.set(f"beat/{self._own.node}", str(next(self._beats)))
        now = time.monotonic()
        for card in self._cards:
            key = f"beat/{card.node}"
            if card.node == self._own.node or card.node in self._lost:
                continue
            beat = store.get(key) if store.check([key]) else b""
            before, since = seen.get(card.node, (None, now))
            if beat.startswith(_GONE.encode()):
                self._lose(card.node, beat.decode().partition(": ")[2])
            elif beat != before:
                seen[card.node] = beat, now
            elif now - since > SILENCE:
                self._lose(card.node, f"there has been no sign of life for {SILENCE:g} s")

    def _look_at_page(self, page: Page, shown: Page) -> None:
        if not self._has_stopped:
            why = page.stopped()
            if why is not None:
                self._has_stopped = True
                self._tell("stop", why=why)
        if self._has_handed_in:
            found = page.handed_in(set(self._lost))
            if found is not None and self._page is shown:
                self._has_handed_in, self._page, self._last_page = False, None, shown
                page.sign_as_read(len(self._lost))
                self._tell("settled", endings={str(node): endings for node, endings in found.items()})

    def _guard(self) -> None:
        while not self._closing.wait(1.0):
            if time.monotonic() - self._answered_at > SILENCE and 0 not in self._lost:
                self._lose(0, f"its store has not answered for {SILENCE:g} s")

    def _lose(self, node: int, text: str) -> None:
        if node not in self._lost:
            self._lost[node] = text
            self._tell("lost", node=node, text=text)

    # ---- the end

    def _bye(self, message: dict[str, Any]) -> None:
        """The first node hosts the store, so it stays until the others have read the end."""
        if "gone" in message and self._store is not None:
            self._store.set(f"beat/{self._own.node}", f"{_GONE}: its agent has ended without a word")
        elif self._listener is not None and self._last_page is not None:
            self._last_page.await_readers(_LAST_WORDS)

    def _start(self, *targets: Any) -> None:
        for target in targets:
            threading.Thread(target=target, name=f"envoy{target.__name__}", daemon=True).start()

    def _tell(self, event: str, **fields: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # the agent is gone; serve() is about to notice
            self._channel.send({"event": event, **fields})
