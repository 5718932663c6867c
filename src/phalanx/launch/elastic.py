"""Nodes that come and go: torch's own dynamic rendezvous decides, round by round, who takes part.

What is added to it: who does not belong here is told at once and why, a count while nodes wait, and the end of a run
for those that came too late. Agents of torchrun speak another language afterwards (how ranks are agreed, how a fault
is told), so phalanx keeps a key of its own in the store, and says so when it sees theirs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx import plain
from phalanx.errors import JoinError
from phalanx.launch.elastic_state import PlainBackend
from phalanx.launch.rendezvous import Book, NodeCard, wait_for
from phalanx.torch_compat import elastic as torch_elastic

KEEP_ALIVE = 2
"""Seconds between signs of life to torch's rendezvous; five missing ones, and a node is out."""
_MISSING = 5
_COUNT_EVERY = 1.0
_LATE_ONES_READ = 3.0
_STORE = "the store where the nodes meet"


class RunOver(Exception):
    """The run has ended before this node could take part."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


@dataclass(frozen=True)
class Terms:
    """How many nodes, and for how long to wait for them."""

    fewest: int
    most: int
    timeout: float
    last_call: float


class Gathering:
    """One node's part in it. ``tell`` hears how many have come, and whether the run is under way without this node."""

    def __init__(self, store: Any, card: NodeCard, terms: Terms, tell: Callable[[int, bool, int], None]) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        # It would open a store for the workers on every network of this machine; ours listens on the chosen one.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # errors reach us as exceptions
        self._store, self._card, self._terms, self._tell = store, card, terms, tell
        missing = torch_elastic.why_not()
        if missing:
            raise JoinError(f"the number of nodes cannot change: {missing}; give one number to --nnodes.")
        complaint = Book(store, card).complaint()
        if complaint:
            raise JoinError(complaint)
        name = f"phalanx.{card.run_id}"
        self._backend: Any = PlainBackend(C10dRendezvousBackend(store, name))
        settings = RendezvousParameters(
            backend="c10d",
            endpoint="",
            run_id=name,
            min_nodes=terms.fewest,
            max_nodes=terms.most,
            local_addr=card.address,
            join_timeout=max(1, round(terms.timeout)),
            last_call_timeout=round(terms.last_call),
            keep_alive_interval=KEEP_ALIVE,
            keep_alive_max_attempt=_MISSING,
        )
        self._handler = create_handler(store, self._backend, settings)

    def next_round(self) -> tuple[str, int, int]:
        """Waits until enough nodes are there: the round's name, the number of this node, and how many there are."""
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousError,
            RendezvousGracefulExitError,
            RendezvousStateError,
            RendezvousTimeoutError,
        )

        with self._counting():
            try:
                found = self._handler.next_rendezvous()
            except RendezvousTimeoutError:
                raise JoinError(self._who_came()) from None
            except (RendezvousClosedError, RendezvousGracefulExitError):
                raise self._why_closed() from None
            except RendezvousStateError as error:  # the store holds what no agent of ours has written
                raise JoinError(str(error)) from None
            except RendezvousError as error:
                raise RuntimeError(str(error.__cause__ or error)) from None
        name = plain.decode(
            found.store.compare_set("name of the round", "", json.dumps(os.urandom(8).hex())), str, _STORE
        )
        return f"round/{name}", found.rank, found.world_size

    def close(self, exit_code: int) -> None:
        """The run is over, for late nodes too. Whoever serves the store says so, and lets them read it."""
        from torch.distributed.elastic.rendezvous import RendezvousError

        try:
            state = self._backend.read()
        except RendezvousError:  # nobody can be waited for then
            state = None
        late = len(state.wait_list) + len(state.redundancy_list) if state is not None else 0
        self._store.set("outcome", str(exit_code))
        self._handler.shutdown()
        deadline = time.monotonic() + _LATE_ONES_READ
        while self._store.add("outcome read", 0) < late and time.monotonic() < deadline:
            wait_for(self._store, "nobody sets this", _COUNT_EVERY / 10)

    # ---- while nodes wait

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        done = threading.Event()
        thread = threading.Thread(target=self._count, args=(done,), name="envoy-count", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()

    def _count(self, done: threading.Event) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousError

        started = time.monotonic()
        with contextlib.suppress(RuntimeError, RendezvousError):  # the store is gone; next_round is about to say so
            while not done.is_set():
                if self._store.check([f"torch.rendezvous.{self._card.run_id}"]):
                    self._store.compare_set("refused", "", _TORCHRUN.format(self._card.run_id))
                    self._handler.set_closed()
                state = self._backend.read()
                if state is not None:
                    self._tell(len(state.participants), bool(state.complete), round(time.monotonic() - started))
                done.wait(_COUNT_EVERY)

    def _who_came(self) -> str:
        state = self._backend.read()
        came = sorted(node.addr for node in state.participants if node.addr != self._card.address) if state else []
        fewest = self._terms.fewest
        text = f"after {self._terms.timeout:g} s {len(came) + 1} of {fewest} nodes {'have' if came else 'has'} come"
        others = f" (with {', '.join(came)})" if came else ""
        return f"{text}{others}; start the same command on the others, or wait longer with --rdzv-timeout."

    def _why_closed(self) -> Exception:
        if self._store.check(["refused"]):
            return JoinError(self._store.get("refused").decode(errors="replace"))
        if not self._store.check(["outcome"]):
            return RuntimeError("the rendezvous was closed without a word")
        code = plain.decode(self._store.get("outcome"), int, _STORE)
        self._store.add("outcome read", 1)
        return RunOver(code)


_TORCHRUN = (
    "an agent of torchrun takes part in the rendezvous {!r} of phalanx agents, and they cannot work together; "
    "start all nodes with `phalanx run`."
)
