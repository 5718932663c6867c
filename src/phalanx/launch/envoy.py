"""The keeper's part in a run of several nodes: it meets the others for its agent, and passes on what they say.

A store behind a cut link answers after many minutes, or never. So the thread that listens to the agent never asks it
anything: another one does what the agent has ordered, and the lookout has threads of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from phalanx import run_files
from phalanx.errors import PhalanxError
from phalanx.events import KEEPER_LOG
from phalanx.fd_channel import Channel
from phalanx.launch.elastic import Gathering, RunOver, Terms
from phalanx.launch.lookout import BEAT, SILENCE, Lookout, say_gone
from phalanx.launch.rendezvous import Book, NodeCard, NodesMissing, Page, Round, wait_for, within
from phalanx.store import tcp_store

_LAST_WORDS = 5.0
_VERDICT_STAYS = 1.0


class Envoy:
    """Of one node. Everything it hears goes to the agent as an event."""

    def __init__(self, channel: Channel, listener: socket.socket | None) -> None:
        """``listener``: this node serves the store, behind it."""
        self._channel, self._listener = channel, listener
        self._sending = threading.Lock()
        self._store: Any = None
        self._hosted: Any = None
        self._gathering: Gathering | None = None
        self._round: Round | None = None
        self._lookout: Lookout | None = None
        self._workers: tuple[socket.socket, Any] | None = None
        """The socket of the workers' store and the store, on the first node."""
        self._orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._has_obeyed = threading.Event()

    def serve(self) -> None:
        """Until the agent says goodbye, or dies, which the other nodes are told."""
        _move_stderr()
        threading.Thread(target=self._obey, name="envoy_obey", daemon=True).start()
        order: dict[str, Any] = {}
        while order.get("op") != "bye":
            received = self._channel.receive()
            order = received[0] if received is not None else {"op": "bye", "exit_code": None}
            self._orders.put(order)
        # It is the last order. If the store has stopped answering, this is not the place to wait for it.
        self._has_obeyed.wait(_LAST_WORDS)
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
            except RunOver as over:
                self._tell("over", exit_code=over.exit_code)
            except RuntimeError as error:
                self._lose_store(f"its store does not answer ({str(error).splitlines()[0]})")
        self._has_obeyed.set()

    def _lose_store(self, text: str) -> None:
        if self._lookout is not None:
            self._lookout.lose_store(text)
        else:
            self._tell("lost", node=0, text=text)

    # ---- what the agent asks for

    def _meet(self, message: dict[str, Any]) -> None:
        card = NodeCard(**{**message["card"], "serves": self._listener is not None})
        terms = Terms(**message["terms"])
        if self._store is None:
            host, port = message["endpoint"]
            self._open(host, port, terms.timeout)
        if self._lookout is not None:
            self._lookout.close()
        if message["elastic"]:
            self._round = self._gather(card, terms)
        else:
            book = Book(within(self._store, "run"), card)
            book.sign()
            self._round = Round("run", card, book.await_verdict(terms.timeout, self._tell_waiting))
        self._tell("met", node=self._round.own.node, cards=[vars(card) for card in self._round.cards])
        self._lookout = Lookout(self._round, self._connect, self._tell)

    def _open(self, host: str, port: int, timeout: float) -> None:
        if self._listener is not None:
            self._hosted = tcp_store.serve(host, self._listener, timeout=60.0)
        self._connect = lambda: tcp_store.connect(host, port, timeout, lambda text: self._tell("note", text=text))
        self._store = self._connect()

    def _gather(self, card: NodeCard, terms: Terms) -> Round:
        """Rounds are made until all who were counted have signed in as well; one may have died in between."""
        if self._gathering is None:
            self._gathering = Gathering(self._store, dataclasses.replace(card, node=-1), terms, self._tell_count)
        while True:
            name, node, nodes = self._gathering.next_round()
            own = dataclasses.replace(card, node=node, nnodes=nodes)
            book = Book(within(self._store, name), own)
            book.sign()
            with contextlib.suppress(NodesMissing):
                return Round(name, own, book.await_verdict(SILENCE + _LAST_WORDS, lambda came, waited: None))

    def _tell_waiting(self, came: int, waited: int) -> None:
        self._tell("waiting", came=came, waited=waited, under_way=False)

    def _tell_count(self, came: int, under_way: bool, waited: int) -> None:
        self._tell("waiting", came=came, waited=waited, under_way=under_way)

    def _attempt(self, message: dict[str, Any]) -> None:
        assert self._round is not None, "the nodes have met"
        assert self._lookout is not None
        page = Page(self._round.within(self._store), message["number"], len(self._round.cards))
        if self._round.own.node == 0:
            self._serve_workers(page, self._round.own.address)
        self._lookout.turn_to(page)
        where = None
        while where is None and 0 not in self._lookout.lost and not self._lookout.is_cut_off:
            where = page.where(BEAT)
        if where is not None:
            self._tell("master", address=where[0], port=where[1])

    def _serve_workers(self, page: Page, address: str) -> None:
        if self._workers is not None:
            self._workers[0].close()
        self._workers = None  # its connections close before the next one is there
        listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=socket.SOMAXCONN
        )
        self._workers = listener, tcp_store.serve(address, listener, timeout=60.0)
        page.open_at(address, listener.getsockname()[1])

    def _stop(self, message: dict[str, Any]) -> None:
        assert self._lookout is not None
        self._lookout.stop(message["why"], message["for_good"])

    def _docket(self, message: dict[str, Any]) -> None:
        """Something about ranks that stand still; of an attempt that is over it is of no use any more."""
        page = self._lookout.page if self._lookout is not None else None
        if page is not None and page.attempt == message["attempt"]:
            getattr(page.docket, message["entry"])(*message["arguments"])

    def _endings(self, message: dict[str, Any]) -> None:
        assert self._lookout is not None
        self._lookout.hand_in(message["endings"])

    def _bye(self, message: dict[str, Any]) -> None:
        """Whoever serves the store stays until the others have read the end."""
        if self._round is None or self._lookout is None:
            return
        code = message["exit_code"]
        if code is None:
            say_gone(self._round.within(self._store), self._round.own.node)
            return
        if self._listener is not None and self._lookout.last_page is not None:
            self._lookout.last_page.await_readers(_LAST_WORDS)
        if self._listener is not None and self._gathering is not None:
            self._gathering.close(code)
        self._lookout.close()

    def _tell(self, event: str, **fields: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # the agent is gone; serve() is about to notice
            self._channel.send({"event": event, **fields})


def _move_stderr() -> None:
    """torch writes about every host without a name and every connection that ends; that is for a file."""
    directory = os.environ.get("PHALANX_RUN_DIR")
    if directory is not None:
        with contextlib.suppress(OSError):
            log = run_files.open_file(Path(directory) / KEEPER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            os.close(log)
