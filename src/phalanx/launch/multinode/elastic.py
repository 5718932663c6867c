"""Nodes that come and go: torch's own dynamic rendezvous decides, round by round, which nodes take part.

Added to it: a node that does not fit is rejected at once with the reason, nodes are counted while they wait, and late
nodes learn that the run has ended. Agents of torchrun have another protocol after the rendezvous, so phalanx has a key
of its own in the store, and reports theirs when it finds one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from phalanx import messages, secret
from phalanx.errors import JoinError
from phalanx.launch.multinode import RunOver
from phalanx.launch.multinode.elastic_state import SealedBackend
from phalanx.launch.multinode.protocol import NodeInfo, Terms
from phalanx.torch_compat.c10d import why_not_elastic

if TYPE_CHECKING:
    from torch.distributed import Store

KEEP_ALIVE = 2
"""Seconds between heartbeats to torch's rendezvous; after five missing ones a node is out."""
_MOST_MISSING = 5
_COUNT_EVERY = 1.0
_OUTCOME_TIMEOUT = 3.0
_STORE = "the store where the nodes meet"


class ElasticRendezvous:
    """One node's part in torch's dynamic rendezvous."""

    def __init__(
        self,
        store: Store,
        own: NodeInfo,
        terms: Terms,
        waiting: Callable[[int, int, bool], None],
        outcome: SimpleQueue[int],
    ) -> None:
        """``waiting`` gets the number of nodes, the seconds, and whether the run is under way without this node;
        ``outcome`` has the exit code of a run that ended without it."""
        # torch would open a store for the workers on every network of this machine; ours listens on the chosen one.
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
            keep_alive_max_attempt=_MOST_MISSING,
        )
        self._handler = create_handler(store, self._backend, settings)

    def next_round(self) -> tuple[str, int, int]:
        """Waits for enough nodes. Returns the round's name, the number of this node, and the number of nodes."""
        done = threading.Event()
        threading.Thread(target=self._count, args=(done,), name="rendezvous-count", daemon=True).start()
        try:
            found = self._handler.next_rendezvous()
        except RendezvousTimeoutError:
            raise JoinError(self._missing_text()) from None
        except (RendezvousClosedError, RendezvousGracefulExitError):
            raise self._why_closed() from None
        except RendezvousStateError as error:  # the store holds what no agent of ours has written
            raise JoinError(str(error)) from None
        except RendezvousError as error:
            raise RuntimeError(str(error.__cause__ or error)) from None
        finally:
            done.set()
        key = f"{self._own.run_id}/name of round"
        given = found.store.compare_set(
            "name of the round", "", messages.seal(key, 0, messages.encode(os.urandom(8).hex())).decode()
        )
        name = messages.decode(messages.open_sealed(key, 0, given, _STORE), str, _STORE)
        return f"round/{name}", found.rank, found.world_size

    def close(self) -> None:
        """Ends the rendezvous; late nodes get the outcome over their connections."""
        self._handler.shutdown()

    # ---- while nodes wait

    def _count(self, done: threading.Event) -> None:
        started = time.monotonic()
        with contextlib.suppress(RuntimeError, RendezvousError):  # the store is gone; next_round is about to raise it
            while not done.is_set():
                if self._sees_torchrun():
                    self._handler.set_closed()
                state = self._backend.read()
                if state is not None:
                    self._waiting(len(state.participants), round(time.monotonic() - started), bool(state.complete))
                done.wait(_COUNT_EVERY)

    def _missing_text(self) -> str:
        state = self._backend.read()
        came = sorted(node.addr for node in state.participants if node.addr != self._own.address) if state else []
        fewest = self._terms.fewest
        text = f"after {self._terms.timeout:g} s {len(came) + 1} of {fewest} nodes {'have' if came else 'has'} come"
        others = f" (with {', '.join(came)})" if came else ""
        return f"{text}{others}; start the same command on the others, or wait longer with --rdzv-timeout."

    def _sees_torchrun(self) -> bool:
        """Returns True for torchrun's key in the store, if the run has no secret, which torchrun could not know."""
        return secret.text() is None and self._store.check([f"torch.rendezvous.{self._own.run_id}"])

    def _why_closed(self) -> Exception:
        if self._sees_torchrun():
            return JoinError(
                f"an agent of torchrun takes part in the rendezvous {self._own.run_id!r} of phalanx agents, and they "
                "cannot work together; start all nodes with `phalanx run`."
            )
        try:
            return RunOver(self._outcome.get(timeout=_OUTCOME_TIMEOUT))
        except Empty:
            return RuntimeError("the rendezvous was closed without a reason")
