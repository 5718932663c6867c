"""Finds the serving node and signs in there: the store holds the hub's address, the rest uses the connection.

Anybody may write to the store, so the address is only tried: the process behind it has to know the run's secret.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from phalanx.errors import ForeignData, JoinError
from phalanx.launch.multinode import protocol
from phalanx.launch.multinode.hub import Hub, Spoke
from phalanx.launch.multinode.links import Receiver, ServerLost
from phalanx.launch.multinode.protocol import LinkMessage, NodeInfo, NodesMissing
from phalanx.messages import HostName, Port, Record
from phalanx.store.primitives import read, write

if TYPE_CHECKING:
    from torch.distributed import Store

_HUB = "phalanx/hub"
_ADVERTISE_EVERY = 0.1
_READ_EVERY = 0.02
_ANSWER_TIMEOUT = 5.0
_RETRY_AFTER = 10.0
_NOTIFY_EVERY = 1.0
_SERVER_MARGIN = 5.0
"""Seconds beyond the timeout for the serving node to report the missing nodes."""


class HubAddress(Record, frozen=True):
    """The address of the serving node's hub."""

    address: HostName
    port: Port


def advertise(store: Store, address: str, port: int, done: threading.Event) -> None:
    """Writes the hub's address to the store, again and again: another process may have overwritten it."""
    with contextlib.suppress(RuntimeError):  # the store is gone, and the run with it
        while not done.is_set():
            write(store, _HUB, HubAddress(address, port))
            done.wait(_ADVERTISE_EVERY)


class Rendezvous:
    """One node's entry into the run. The answers to it arrive on the connection's thread."""

    def __init__(self, receiver: Receiver) -> None:
        """``receiver`` gets every message that is no answer."""
        self._deliver = receiver
        self._answers: SimpleQueue[LinkMessage | None] = SimpleQueue()
        self._arrived = 0
        self._is_in = False
        self.is_leaving = threading.Event()
        """The agent stops waiting."""
        self.link: Hub | Spoke | None = None

    def serve(self, hub: Hub) -> None:
        """This node serves, so no other has to accept it."""
        self.link, self._is_in = hub, True

    def receive(self, message: LinkMessage | protocol.Ignored | ServerLost) -> None:
        """Sorts out the answers; called on the connection's thread."""
        match message:
            case protocol.Welcome() | protocol.Refused() | protocol.Missing():
                self._is_in = self._is_in or isinstance(message, protocol.Welcome)
                self._answers.put(message)
            case protocol.Arrived(count):
                self._arrived = count
            case protocol.Met():
                self._deliver(message)
                self._answers.put(message)
            case protocol.Ignored() if not self._is_in:
                pass  # another process has answered; `connect` reports it
            case ServerLost() if not self._is_in:
                self._answers.put(None)
            case _:
                self._deliver(message)

    def connect(self, store: Store, host: str, own: NodeInfo, timeout: float, notice: Callable[[str], None]) -> Spoke:
        """Connects to the hub. Its address may have been overwritten, so new ones are tried until the timeout."""
        deadline = time.monotonic() + timeout
        refused: dict[HubAddress, float] = {}
        why = f"{host} has not announced within {timeout:g} s where the nodes meet; another program may have that port"
        while True:
            hub, now = _hub_address(store), time.monotonic()
            if hub is not None and now >= refused.get(hub, now):
                found = self._try(hub, own)
                if isinstance(found, Spoke):
                    return found
                if not refused:
                    notice(f"{found}; trying again")
                why, refused[hub] = found, time.monotonic() + _RETRY_AFTER
            if now >= deadline:
                raise JoinError(f"{why}.")
            self.is_leaving.wait(_READ_EVERY)
            self._check_leaving()

    def _try(self, hub: HubAddress, own: NodeInfo) -> Spoke | str:
        """Returns the connection, or why there is none."""
        try:
            sock = socket.create_connection((hub.address, hub.port), _ANSWER_TIMEOUT)
        except (OSError, ValueError) as error:  # a name that cannot be one is a ValueError
            why = f"{hub.address}:{hub.port} cannot be reached ({getattr(error, 'strerror', None) or 'no answer'})"
            return f"{why}; a firewall must let the nodes talk to each other on all ports"
        self._answers = SimpleQueue()
        spoke = Spoke(sock, own, self.receive)
        answer = self._answer(_ANSWER_TIMEOUT)
        if isinstance(answer, protocol.Welcome):
            self.link = spoke
            return spoke
        spoke.leave(None, 0.0)
        if isinstance(answer, protocol.Refused):
            raise JoinError(answer.text)
        return (
            f"{hub.address} and this node have different secrets, or one of them has none; "
            "give all nodes the same --secret-file"
        )

    def _check_leaving(self) -> None:
        if self.is_leaving.is_set():
            raise JoinError("this node leaves before it has met the others.")

    def _answer(self, seconds: float) -> LinkMessage | None:
        try:
            return self._answers.get(timeout=seconds)
        except Empty:
            return None

    def sign_in(
        self, name: str, info: NodeInfo, timeout: float, waiting: Callable[[int, int], None]
    ) -> tuple[NodeInfo, ...]:
        """Returns all nodes of the round. ``waiting`` gets, once a second, how many have signed in, and the seconds."""
        assert self.link is not None
        self._arrived, started, has_given_up = 1, time.monotonic(), False
        self.link.sign_in(name, info)
        while True:
            match self._answer(_NOTIFY_EVERY):
                case protocol.Met(round=found, nodes=nodes) if found == name:
                    return nodes
                case protocol.Missing(round=found, text=text) if found == name:
                    raise NodesMissing(text)
                case protocol.Refused(text):
                    raise JoinError(text)
            self._check_leaving()
            waited = time.monotonic() - started
            waiting(self._arrived, round(waited))
            if waited >= timeout and not has_given_up:
                has_given_up = True
                self.link.give_up(name, timeout)
            if waited >= timeout + _SERVER_MARGIN:
                raise NodesMissing(f"the serving node has not answered within {waited:.0f} s.")


def _hub_address(store: Store) -> HubAddress | None:
    if not store.check([_HUB]):
        return None
    try:
        return read(store, _HUB, HubAddress)
    except ForeignData:  # the serving node writes it again
        return None
