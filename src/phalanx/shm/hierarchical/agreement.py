"""Begins and fails the collectives across nodes: they begin when all ranks agree, and fail on all for one reason.

A collective begins with its signature: the ranks of a node compare theirs in shared memory, the leaders of the nodes
theirs over `LeaderLinks`. So gloo moves data only when every rank is there and calls the same collective.

The first rank that fails writes its error to the store (`FailureFlag`), then aborts the shared memory of its node. That
ends the waits of all ranks there at once, and they read the cause from the store. Leaders also send it to each other,
and a rank that waits for the network looks for failures ten times a second. So every rank raises the same error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.native.library import Signature
from phalanx.shm.hierarchical.gloo_groups import GlooGroup, abandon, first_line, is_done
from phalanx.shm.hierarchical.leader_links import SLICE, LeaderLinks
from phalanx.shm.hierarchical.topology import Topology
from phalanx.shm.node import failures
from phalanx.shm.node.collectives import NodeCollectives
from phalanx.shm.node.failures import CollectiveAborted, Names, PeerLost
from phalanx.shm.node.segment import Segment
from phalanx.store.failure_flag import FailureFlag
from phalanx.store.join import Claim
from phalanx.torch_compat.c10d import Gloo

_SIGNATURE_BYTES = len(bytes(Signature()))
_GRACE = 1.0
"""Seconds beyond the timeout that a leader waits for another node, which can name its late rank."""
_LONGER = 3.0
"""Seconds beyond the timeout that a rank waits for its leader, which can name the late rank."""
_FOR_THE_CAUSE = 1.0
_STORE_INTERVAL = 0.5


class _GlooFailed(Exception):
    """An error of gloo, which names no rank."""


class Agreement:
    """One rank's side of the agreement, with the shared memory of its node and its connections."""

    def __init__(
        self,
        store: dist.Store,
        nodes: Topology,
        claims: Sequence[Claim],
        timeout: timedelta,
        names: Names,
        address: str,
        gloo: Gloo,
    ) -> None:
        """``gloo`` is a group of all ranks."""
        self.nodes, self.names, self.gloo = nodes, names, gloo
        seconds = timeout.total_seconds()
        names.number = 0
        names.hosts = tuple(claim.host for claim in claims)
        here = [claims[rank] for rank in nodes.own_ranks]
        self._names_here = Names(names.group, [names.ranks[rank] for rank in nodes.own_ranks], seconds, number=0)
        self._names_here.pids = tuple(claim.pid for claim in here)
        self._names_here.hosts = tuple(claim.host for claim in here)
        within = dist.PrefixStore(f"node/{nodes.own_node}", store)
        self._failure_flag = FailureFlag(store, failures.by_name)
        self._links: LeaderLinks | None = None
        with contextlib.ExitStack() as on_error:
            self._segment = Segment(within, here, nodes.local_rank, seconds, self._names_here)
            on_error.callback(self._segment.close)
            if nodes.is_leader:
                self._links = LeaderLinks(store, nodes, address, seconds, names)
                on_error.callback(self._links.close)
            self.gloo_group = GlooGroup(store, nodes, timeout, address, names) if nodes.has_gloo_group else None
            on_error.pop_all()
        self._entry = NodeCollectives(self._segment, seconds)
        self.local = NodeCollectives(self._segment, seconds)
        self._broken: Exception | None = None
        self._looked = 0.0
        self.set_timeout(seconds)

    def set_timeout(self, seconds: float) -> None:
        self._timeout = self._names_here.timeout = self.names.timeout = seconds
        self._entry.set_timeout(seconds)
        self.local.set_timeout(seconds + _LONGER)

    # ---- beginning

    @contextlib.contextmanager
    def collective(self, signature: Signature) -> Iterator[None]:
        """Runs the body when all ranks of this node have the same signature. An error in it fails all ranks."""
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))
        assert self.names.number is not None, "set when the group was made"
        self.names.number += 1
        self._names_here.number = self.names.number
        try:
            self._compare_here(signature)
            yield
        except (_GlooFailed, dist.DistBackendError) as error:
            raise self._break(self._cause_of(error)) from None
        except BaseException:
            self._break(failures.aborted(self.names, self.nodes.rank))
            raise

    def _compare_here(self, signature: Signature) -> None:
        mates = self.nodes.own_ranks
        if len(mates) == 1:
            return
        mine = torch.frombuffer(bytearray(signature), dtype=torch.uint8)
        everyone = torch.empty(len(mates) * _SIGNATURE_BYTES, dtype=torch.uint8)
        self._entry.all_gather(everyone, mine)
        data = everyone.numpy().tobytes()
        self._compare([data[i : i + _SIGNATURE_BYTES] for i in range(0, len(data), _SIGNATURE_BYTES)], mates)

    def _compare(self, signatures: Sequence[bytes | bytearray | memoryview], ranks: Sequence[int]) -> None:
        for rank, signature in zip(ranks, signatures, strict=True):
            if signature != signatures[0]:
                ours, theirs = (Signature.from_buffer_copy(found) for found in (signatures[0], signature))
                raise failures.mismatch(self.names, ranks[0], ours, rank, theirs)

    def agree(self, signature: Signature, payload: bytes | memoryview = b"") -> list[memoryview]:
        """Checks, for leaders, that all nodes have the same signature. Returns the payload of each node."""
        assert self._links is not None, "a leader has links"
        word = bytearray(signature)
        word += payload
        words = [memoryview(w) for w in self._links.exchange(word, self._timeout + _GRACE, self._look)]
        leaders = [self.nodes.leader_of(node) for node in range(self.nodes.count)]
        self._compare([word[:_SIGNATURE_BYTES] for word in words], leaders)
        return [word[_SIGNATURE_BYTES:] for word in words]

    def agree_all(self, signature: Signature) -> None:
        """Returns when every rank of every node may move data."""
        if self.nodes.is_leader:
            self.agree(signature)
        self.local.barrier()

    # ---- waiting

    def wait(self, work: dist.Work, peers: Sequence[int]) -> None:
        """Waits for a transfer by gloo, to or from ``peers``."""
        deadline = time.monotonic() + self._timeout + _GRACE
        while not self._is_done(work):
            self._look()
            if time.monotonic() > deadline:
                raise failures.timed_out(self.names, self.nodes.rank, peers, self._timeout)

    def _is_done(self, work: dist.Work) -> bool:
        try:
            return is_done(work, SLICE)
        except RuntimeError as error:
            raise _GlooFailed(first_line(error)) from None

    def _look(self) -> None:
        """Raises the failure of another rank, if one is known."""
        if self._segment.has_failed:
            raise self._segment.failure()
        if self._links is not None:
            self._links.look()
        now = time.monotonic()
        if now - self._looked > _STORE_INTERVAL:
            self._looked = now
            cause = self._failure_flag.cause()
            if cause is not None:
                raise cause

    # ---- failing

    def _cause_of(self, error: Exception) -> Exception:
        if not isinstance(error, (_GlooFailed, CollectiveAborted)):
            return error
        # Another rank of this node has ended the wait, or gloo has: the rank that knows why writes it to the store.
        known = self._failure_flag.cause(_FOR_THE_CAUSE)
        if known is not None:
            return known
        if isinstance(error, _GlooFailed):
            return self._explain(error)
        return failures.cut_off(self.names, self.nodes.rank) if self._failure_flag.is_silent else error

    def _explain(self, error: _GlooFailed) -> PeerLost:
        """Returns an error that names the lost rank, or those that it can be."""
        suspects = self._links.ended() if self._links is not None else []
        suspects = suspects or list(self.nodes.gloo_peers if self.nodes.has_gloo_group else ())
        if len(suspects) == 1:
            return failures.unreachable(self.names, suspects[0], str(error))
        who = self.names.those(suspects, " or ")
        return PeerLost(f"{who} has ended or cannot be reached in {self.names.where()}: {error}")

    def _break(self, error: Exception) -> Exception:
        """Fails the group on all ranks. Returns the cause: the error that was first."""
        cause = self._failure_flag.raise_with(error)
        self._broken = cause
        self._segment.abort()
        if self._links is not None:
            self._links.send_failure(cause)
        return cause

    def abort(self) -> None:
        """Ends all waits of the group, from any thread."""
        self._failure_flag.raise_with(failures.aborted(self.names, self.nodes.rank))
        self._segment.abort()

    # ---- leaving

    def close(self) -> None:
        if self._segment.has_failed and self._broken is None:
            self._break(self._failure_flag.cause() or self._segment.failure())
        if self._links is not None:
            self._links.close()
        if self._broken is not None:
            for gloo in (self.gloo, self.gloo_group.gloo if self.gloo_group is not None else None):
                abandon(gloo)
        self.gloo_group = None
        self._segment.close()

    def forked(self) -> None:
        if self._links is not None:
            self._links.drop()
