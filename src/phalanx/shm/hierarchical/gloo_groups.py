"""gloo between the nodes: its address, its groups, and send and recv."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import socket
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from phalanx.errors import JoinError, UsageError
from phalanx.shm.hierarchical import reduction_plan
from phalanx.shm.hierarchical.reduction_plan import Reduction
from phalanx.shm.hierarchical.topology import Topology
from phalanx.shm.node.failures import CollectiveTimeout, Names, PeerLost
from phalanx.shm.node.status_log import StatusLog
from phalanx.shm.node.tensors import Staging, contiguous
from phalanx.status import layout
from phalanx.system.ports import LOOPBACK, interface_addresses
from phalanx.torch_compat.c10d import Gloo, new_gloo, set_gloo_timeout, source_rank

NEVER = timedelta(days=1)
"""gloo's own timeout, once it is connected. `Agreement` has the real one, and can name the late rank."""


def own_address(store: dist.Store, nodes: Topology, hosts: Collection[str]) -> str:
    """Returns the address by which the other ranks reach this one."""
    if nodes.count == 1:
        return LOOPBACK
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    towards = _address_towards(store)
    if interface:
        return _address_of(interface, towards)
    others = (_address_to(host) for host in hosts if host != socket.gethostname())  # lazily: it asks for names
    for address in itertools.chain((towards, _address_of_host()), others):
        if address and (len(set(hosts)) == 1 or not address.startswith("127.")):
            return address
    raise JoinError(
        f"host {socket.gethostname()} does not know by which address other nodes reach it; "
        "set GLOO_SOCKET_IFNAME to its network interface."
    )


def _address_of(interface: str, towards: str | None) -> str:
    """Returns the interface's address towards the store, or its first one, as gloo would."""
    found = interface_addresses(with_scope=True).get(interface, [])
    if not found:
        raise JoinError(f"GLOO_SOCKET_IFNAME is {interface!r}, but there is no such interface with an address.")
    return towards if towards in found else found[0]


def _address_towards(store: dist.Store) -> str | None:
    """Returns the own address of a connection to the store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    return _address_to(store.host, store.port)


def _address_to(host: str, port: int = 9) -> str | None:
    """Returns the own address of a packet to a host."""
    try:
        family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing; the kernel only chooses the route
            return probe.getsockname()[0]
    except OSError:
        return None


def _address_of_host() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


@dataclass
class Transfer:
    """A transfer by gloo that has started."""

    work: dist.Work
    finish: Callable[[], None]
    """Called when the work is done."""


class GlooGroup:
    """gloo between the ranks with the same local rank. Its methods return when the transfer has started."""

    def __init__(self, store: dist.Store, nodes: Topology, timeout: timedelta, address: str, names: Names) -> None:
        self._nodes = nodes
        gloo_group = dist.PrefixStore(f"gloo/{nodes.local_rank}", store)
        try:
            self.gloo = new_gloo(gloo_group, nodes.own_node, nodes.count, timeout, address)
        except RuntimeError as error:
            raise JoinError(
                f"gloo cannot connect {names.those([nodes.rank, *nodes.gloo_peers])}: {first_line(error)}"
            ) from None
        set_gloo_timeout(self.gloo, NEVER)

    def all_reduce(self, part: Tensor, reduction: Reduction) -> Transfer:
        native = reduction_plan.by_gloo(part, reduction.between, self._nodes.count)
        if native is None:
            return self._gather_and_combine(part, reduction)
        seen, options = native[0], c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(native[1])
        return Transfer(self.gloo.allreduce([seen], options), lambda: reduction_plan.divide(part, reduction.divisor))

    def _gather_and_combine(self, part: Tensor, reduction: Reduction) -> Transfer:
        blocks = [torch.empty_like(part) for _ in range(self._nodes.count)]

        def finish() -> None:
            part.copy_(reduction_plan.combine(blocks, reduction.between))
            reduction_plan.divide(part, reduction.divisor)

        views = [block.view(torch.uint8) for block in blocks]
        return Transfer(self.gloo.allgather([views], [part.view(torch.uint8)]), finish)

    def broadcast(self, part: Tensor, origin: int) -> Transfer:
        """``origin`` is a node."""
        options = c10d.BroadcastOptions()
        options.rootRank = origin
        return Transfer(self.gloo.broadcast([part.view(torch.uint8)], options), lambda: None)


def abandon(gloo: Gloo | None) -> None:
    """Keeps a broken group from being freed: gloo would wait for its unfinished transfers."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))


def is_done(work: dist.Work, seconds: float) -> bool:
    """Waits for a work up to ``seconds``, and raises its error."""
    try:
        return work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
    return work.wait()


# ---- send and recv


class GlooMessage(dist.Work):
    """A send or a receive by gloo, with our exceptions."""

    def __init__(
        self,
        work: dist.Work,
        what: str,
        staging: Staging,
        names: Names,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._work, self._what, self._staging, self._names = work, what, staging, names
        self._waiting = waiting

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds() or self._names.timeout
        try:
            with self._waiting():
                self._work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                text = f"the timeout of {limit:g} s is over: {self._what} in group '{self._names.group}' has not ended."
                raise CollectiveTimeout(text) from None
            raise PeerLost(f"{self._what} in group '{self._names.group}' failed: {first_line(error)}") from None
        self._staging.finish()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def _source_rank(self) -> int:
        return source_rank(self._work)


class GlooMessages:
    """send and recv of a group on several nodes, as `Messages` does them within one."""

    def __init__(self, gloo: Gloo, names: Names, status_log: StatusLog) -> None:
        self._gloo, self._names, self._status_log = gloo, names, status_log
        self.closed: str | None = None

    def send(self, tensor: Tensor, peer: int, tag: int) -> GlooMessage:
        self._check()
        staging = Staging()
        work = self._gloo.send([contiguous(tensor)], peer, tag)
        waiting = functools.partial(self._status_log.waiting, layout.SEND, tensor, peer)
        return GlooMessage(work, f"a message to {self._names(peer)} with tag {tag}", staging, self._names, waiting)

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> GlooMessage:
        self._check()
        staging = Staging()
        block = staging.write(tensor)
        work = self._gloo.recv_anysource([block], tag) if peer is None else self._gloo.recv([block], peer, tag)
        sender = "any rank" if peer is None else self._names(peer)
        waiting = functools.partial(self._status_log.waiting, layout.RECV, tensor, peer)
        return GlooMessage(work, f"a message from {sender} with tag {tag}", staging, self._names, waiting)

    def close(self, reason: str) -> None:
        self.closed = reason

    def _check(self) -> None:
        if self.closed:
            raise UsageError(self.closed)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
