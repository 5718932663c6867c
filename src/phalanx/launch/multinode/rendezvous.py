"""How a node finds the serving one and signs in: the store says where the hub listens, the rest goes over the link.

What stands in the store is believed by nobody: whoever answers there has to know the run's secret.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from phalanx import messages
from phalanx.errors import ForeignData, JoinError
from phalanx.launch.multinode import protocol
from phalanx.launch.multinode.hub import Hub
from phalanx.launch.multinode.links import Cut, Spoke, Tell
from phalanx.launch.multinode.protocol import LinkMessage, NodeInfo, NodesMissing
from phalanx.messages import Name, Port, Record

if TYPE_CHECKING:
    from torch.distributed import Store

STORE = "the store where the nodes meet"
_HUB = "phalanx/hub"
_ADVERTISE_EVERY = 0.1
_READ_EVERY = 0.02
_ANSWER = 5.0
_TRY_AGAIN = 10.0
_SLICE = 1.0
_LEAVE_SECONDS = 5.0


class HubAddress(Record, frozen=True):
    """Where the serving node's hub listens."""

    address: Name
    port: Port


def advertise(store: Store, address: str, port: int, done: threading.Event) -> None:
    """Writes it again and again: somebody may have overwritten it."""
    with contextlib.suppress(RuntimeError):  # the store is gone, and the run with it
        while not done.is_set():
            store.set(_HUB, messages.encode(HubAddress(address, port)).decode())
            done.wait(_ADVERTISE_EVERY)


class Rendezvous:
    """This node's way into the run. Answers about it come from the link's thread."""

    def __init__(self, tell: Tell) -> None:
        """``tell`` gets every message of the link that is no answer."""
        self._tell = tell
        self._answers: SimpleQueue[LinkMessage | None] = SimpleQueue()
        self._arrived = 0
        self._is_in = False
        self.is_leaving = threading.Event()
        """The agent does not want to wait any longer."""
        self.link: Hub | Spoke | None = None

    def serve(self, hub: Hub) -> None:
        """This node serves, and need not be taken in."""
        self.link, self._is_in = hub, True

    def hear(self, message: LinkMessage | protocol.Ignored | Cut) -> None:
        """What the link hears; called on its thread."""
        match message:
            case protocol.Welcome() | protocol.Refused() | protocol.Missing():
                self._is_in = self._is_in or isinstance(message, protocol.Welcome)
                self._answers.put(message)
            case protocol.Arrived(count):
                self._arrived = count
            case protocol.Met():
                self._tell(message)
                self._answers.put(message)
            case protocol.Ignored() if not self._is_in:
                pass  # whoever answered is not the serving node, which is said below
            case Cut() if not self._is_in:
                self._answers.put(None)
            case _:
                self._tell(message)

    def connect(self, store: Store, host: str, own: NodeInfo, timeout: float, notice: Callable[[str], None]) -> Spoke:
        """Connects to the hub. Somebody may have overwritten its address, so others are tried until the time is up."""
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
                why, refused[hub] = found, time.monotonic() + _TRY_AGAIN
            if now >= deadline:
                raise JoinError(f"{why}.")
            self.is_leaving.wait(_READ_EVERY)
            self._check_leaving()

    def _try(self, hub: HubAddress, own: NodeInfo) -> Spoke | str:
        """The connection, or why there is none."""
        try:
            sock = socket.create_connection((hub.address, hub.port), _ANSWER)
        except OSError as error:
            why = f"{hub.address}:{hub.port} cannot be reached ({error.strerror or 'no answer'})"
            return f"{why}; a firewall must let the nodes talk to each other on all ports"
        self._answers = SimpleQueue()
        spoke = Spoke(sock, own, self.hear)
        answer = self._answer(_ANSWER)
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
        """All nodes of the round. ``waiting`` hears, once a second, how many have signed in, and for how long."""
        assert self.link is not None
        self._arrived, started, has_given_up = 1, time.monotonic(), False
        self.link.sign_in(name, info)
        while True:
            match self._answer(_SLICE):
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
            if waited >= timeout + _LEAVE_SECONDS:
                raise NodesMissing(f"the serving node has not answered within {waited:.0f} s.")


def _hub_address(store: Store) -> HubAddress | None:
    if not store.check([_HUB]):
        return None
    try:
        return messages.decode(store.get(_HUB), HubAddress, STORE)
    except ForeignData:  # the serving node writes it again
        return None
