"""Nodes that come and go: torch's own dynamic rendezvous decides, round by round, who takes part.

What is added to it: who does not belong here is told at once and why, a count while nodes wait, and the end of a run
for those that came too late. Agents of torchrun speak another language afterwards (how ranks are agreed, how a fault
is told), so phalanx keeps a key of its own in the store, and says so when it sees theirs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from phalanx import messages, secret
from phalanx.errors import JoinError
from phalanx.launch.multinode import RunOver
from phalanx.launch.multinode.elastic_state import SealedBackend
from phalanx.launch.multinode.protocol import NodeInfo, Terms
from phalanx.torch_compat.c10d import why_not_elastic

if TYPE_CHECKING:
    from torch.distributed import Store

KEEP_ALIVE = 2
"""Seconds between signs of life to torch's rendezvous; five missing ones, and a node is out."""
_MISSING = 5
_COUNT_EVERY = 1.0
_OUTCOME_COMES = 3.0
_STORE = "the store where the nodes meet"


class ElasticRendezvous:
    """One node's part in it."""

    def __init__(
        self,
        store: Store,
        own: NodeInfo,
        terms: Terms,
        waiting: Callable[[int, int, bool], None],
        outcome: SimpleQueue[int],
    ) -> None:
        """``waiting`` hears how many have come, for how long, and whether the run is under way without this node;
        ``outcome`` gets the exit code of a run that has ended without it."""
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        # It would open a store for the workers on every network of this machine; ours listens on the chosen one.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # errors reach us as exceptions
        missing = why_not_elastic()
        if missing:
            raise JoinError(f"the number of nodes cannot change: {missing}; give one number to --nnodes.")
        self._store, self._own, self._terms, self._waiting, self._outcome = store, own, terms, waiting, outcome
        name = f"phalanx.{own.run_id}"
        self._backend = SealedBackend(C10dRendezvousBackend(store, name), name)
        settings = RendezvousParameters(
            backend="c10d",
            endpoint="",
            run_id=name,
            min_nodes=terms.fewest,
            max_nodes=terms.most,
            local_addr=own.address,
            join_timeout=max(1, round(terms.timeout)),
            last_call_timeout=round(terms.last_call),
            keep_alive_interval=KEEP_ALIVE,
            keep_alive_max_attempt=_MISSING,
        )
        self._handler = create_handler(store, cast(Any, self._backend), settings)

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
        key = f"{self._own.run_id}/name of round"
        given = found.store.compare_set(
            "name of the round", "", messages.seal(key, 0, messages.encode(os.urandom(8).hex())).decode()
        )
        name = messages.decode(messages.open_sealed(key, 0, given, _STORE), str, _STORE)
        return f"round/{name}", found.rank, found.world_size

    def close(self) -> None:
        """The run is over, for late nodes too; their links say how."""
        self._handler.shutdown()

    # ---- while nodes wait

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        done = threading.Event()
        thread = threading.Thread(target=self._count, args=(done,), name="rendezvous-count", daemon=True)
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
                if self._sees_torchrun():
                    self._handler.set_closed()
                state = self._backend.read()
                if state is not None:
                    self._waiting(len(state.participants), round(time.monotonic() - started), bool(state.complete))
                done.wait(_COUNT_EVERY)

    def _who_came(self) -> str:
        state = self._backend.read()
        came = sorted(node.addr for node in state.participants if node.addr != self._own.address) if state else []
        fewest = self._terms.fewest
        text = f"after {self._terms.timeout:g} s {len(came) + 1} of {fewest} nodes {'have' if came else 'has'} come"
        others = f" (with {', '.join(came)})" if came else ""
        return f"{text}{others}; start the same command on the others, or wait longer with --rdzv-timeout."

    def _sees_torchrun(self) -> bool:
        """Everybody can write that key, and with a secret no agent of torchrun takes part anyway."""
        return secret.text() is None and self._store.check([f"torch.rendezvous.{self._own.run_id}"])

    def _why_closed(self) -> Exception:
        if self._sees_torchrun():
            return JoinError(_TORCHRUN.format(self._own.run_id))
        try:
            return RunOver(self._outcome.get(timeout=_OUTCOME_COMES))
        except Empty:
            return RuntimeError("the rendezvous was closed without a reason")


_TORCHRUN = (
    "an agent of torchrun takes part in the rendezvous {!r} of phalanx agents, and they cannot work together; "
    "start all nodes with `phalanx run`."
)
