"""The sealed connections between nodes, with a hub and its spokes in this process."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from msgspec.structs import replace

from phalanx import messages, secret
from phalanx.errors import ForeignData
from phalanx.launch.multinode import hub, links, protocol
from phalanx.launch.multinode.hub import Hub, Spoke
from phalanx.launch.multinode.links import Connection, ServerLost
from phalanx.launch.multinode.protocol import NodeInfo
from phalanx.launch.multinode.rendezvous import HubAddress, Rendezvous

INFO = NodeInfo(0, "node0", "127.0.0.1", 1, 3, "3", 0, "none", "2.13", "1.0", "/runs/x", serves=True)


class Round:
    """A hub and what each node hears."""

    def __init__(self, elastic: bool = False) -> None:
        self.heard: list[SimpleQueue[Any]] = [SimpleQueue()]
        self.hub = Hub(socket.create_server(("127.0.0.1", 0)), INFO, elastic, self.heard[0].put)
        self.spokes: list[Spoke] = []

    def join(self, **changes: Any) -> int:
        info = replace(INFO, node=len(self.heard), host=f"node{len(self.heard)}", serves=False, **changes)
        self.heard.append(SimpleQueue())
        self.spokes.append(Spoke(self.connect(), info, self.heard[-1].put))
        self.spokes[-1].sign_in("run", info)
        return info.node

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.hub.port))

    def next(self, node: int, kind: type | None = None) -> Any:
        """The next message that it hears, of this kind."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            try:
                message = self.heard[node].get(timeout=10.0)
            except Empty:
                break
            if kind is None or isinstance(message, kind):
                return message
        raise AssertionError(f"node {node} has not heard {kind}")

    def close(self) -> None:
        for spoke in self.spokes:
            spoke.leave(None, 0.1)
        self.hub.leave(None, 0.1)


@pytest.fixture(params=["with a secret", "without"])
def with_secret(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_own", b"ab" * 16 if request.param == "with a secret" else None)


@pytest.fixture
def begin() -> Iterator[Callable[..., Round]]:
    rounds: list[Round] = []

    def begin(**options: Any) -> Round:
        rounds.append(Round(**options))
        return rounds[-1]

    yield begin
    for each in rounds:
        each.close()


@pytest.mark.usefixtures("with_secret")
def test_nodes_meet_talk_and_are_lost(begin: Callable[..., Round]) -> None:
    nodes = begin()
    nodes.hub.sign_in("run", INFO)
    nodes.join()
    nodes.join()
    for node in range(3):
        met = nodes.next(node, protocol.Met)
        assert [info.host for info in met.nodes] == ["node0", "node1", "node2"]
    stop = protocol.Stop(0, "why", for_good=True)
    nodes.spokes[0].post(stop)
    for node in (0, 2):
        assert nodes.next(node) == protocol.Relayed(1, stop)
    pace = protocol.Published(0, "pace", b"\x00\xff", to_all=False)
    nodes.spokes[1].post(pace)
    assert nodes.next(0) == protocol.Relayed(2, pace)
    nodes.hub.post(replace(pace, to_all=True))
    assert nodes.next(1) == protocol.Relayed(0, replace(pace, to_all=True)), "what was for the hub alone was not here"
    nodes.spokes[1].leave(None, 1.0)
    for node in (0, 1):
        assert nodes.next(node) == protocol.NodeLost(2, "its agent has ended or was killed")
    nodes.hub.leave(None, 1.0)
    assert nodes.next(1) == protocol.NodeLost(0, "its agent has ended or was killed")
    assert isinstance(nodes.next(1), ServerLost)


def test_nodes_that_do_not_fit(begin: Callable[..., Round]) -> None:
    nodes = begin()
    nodes.hub.sign_in("run", INFO)
    nodes.join(max_restarts=3)
    for node in (0, 1):
        text = nodes.next(node, protocol.Refused).text
        assert text.startswith(
            "node 1 (host node1, 127.0.0.1) has --max-restarts 3, but node 0 (host node0, 127.0.0.1)"
        )
    elastic = begin(elastic=True)
    elastic.join(max_restarts=3)
    assert elastic.next(1, protocol.Refused)
    elastic.hub.sign_in("run", INFO)
    elastic.hub.give_up("run", 5.0)
    assert elastic.next(0, protocol.Missing).text.startswith("after 5 s node"), "it waits on"


def test_a_node_that_says_nothing_is_lost(begin: Callable[..., Round], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENCE", 0.5)
    nodes = begin()
    mute = Connection(nodes.connect(), is_hub=False)
    nodes.hub.sign_in("run", replace(INFO, nnodes=2))
    info = replace(INFO, node=1, nnodes=2, serves=False)
    mute.send(protocol.Hello(info))
    mute.send(protocol.SignIn("run", info))
    deadline = time.monotonic() + 10.0
    while not mute.is_known:
        assert time.monotonic() < deadline
        mute.flush()
        list(mute.receive())
    mute.flush()
    assert nodes.next(0, protocol.NodeLost) == protocol.NodeLost(1, "there has been no sign of life for 0.5 s")
    mute.close()


def test_strangers(begin: Callable[..., Round], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not know the secret is not listened to, whatever it sends, and nobody else notices."""
    monkeypatch.setattr(secret, "_own", b"ab" * 16)
    nodes = begin()
    nodes.hub.sign_in("run", INFO)
    nodes.join()
    sealed = record_of(nodes)
    forged = messages.encode(protocol.SignIn("run", replace(INFO, node=2)))
    greeting = links._GREETING + bytes(16)
    for said in (b"GET / HTTP/1.1\r\n\r\n", greeting + frame(b"-" * 32 + forged), greeting + sealed, b"\xff" * 9000):
        with nodes.connect() as stranger:
            stranger.sendall(said)
            assert nodes.next(0, protocol.Ignored).text.startswith("a message from 127.0.0.1 is ignored: ")
    held = [nodes.connect() for _ in range(hub._MOST_UNAUTHENTICATED + 10)]
    nodes.join()
    assert len(nodes.next(1, protocol.Met).nodes) == 3
    for each in held:
        each.close()


def test_somebody_poses_as_the_hub(begin: Callable[..., Round], monkeypatch: pytest.MonkeyPatch) -> None:
    """And says in the store that it is the one. It is not believed, and the real one is found when it is there."""
    from torch.distributed import HashStore

    monkeypatch.setattr(secret, "_own", b"ab" * 16)
    nodes, store, notices, heard = begin(), HashStore(), [], SimpleQueue()
    forged = links._GREETING + bytes(16) + frame(b"-" * 32 + messages.encode(protocol.Refused("forged")))
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def pose() -> None:
            connection, _ = fake.accept()
            with connection:
                connection.sendall(forged)
                connection.recv(1 << 12)
            store.set("phalanx/hub", "junk")
            store.set("phalanx/hub", address_of(nodes.hub.port))

        posing = threading.Thread(target=pose)
        posing.start()
        store.set("phalanx/hub", address_of(fake.getsockname()[1]))
        rendezvous = Rendezvous(heard.put)
        nodes.spokes.append(
            rendezvous.connect(store, "127.0.0.1", replace(INFO, node=1, serves=False), 20.0, notices.append)
        )
        posing.join()
    (notice,) = notices
    assert notice.startswith("127.0.0.1 and this node have different secrets, or one of them has none; give all nodes")
    assert heard.empty()


def address_of(port: int) -> str:
    return messages.encode(HubAddress("127.0.0.1", port)).decode()


def record_of(nodes: Round) -> bytes:
    """What a node of this run has sent on its own connection, sealed."""
    connection = Connection(nodes.connect(), is_hub=False)
    deadline = time.monotonic() + 10.0
    while connection._session is None:
        assert time.monotonic() < deadline
        list(connection.receive())
    connection.flush()
    connection.send(protocol.SignIn("run", replace(INFO, node=2)))
    sealed = bytes(connection._out)
    connection.close()
    return sealed


def frame(content: bytes) -> bytes:
    return struct.pack("!I", len(content)) + content


def test_an_address_that_somebody_else_has_written() -> None:
    """What cannot be a name is refused when it is read; what looks like one is not reached, and no thread dies."""
    for address in ("\x1b[2J\x1b[31m", "host\nphalanx: all is well", "a b", ""):
        with pytest.raises(ForeignData):
            messages.decode(messages.encode({"address": address, "port": 9}), HubAddress, "the store")
    for address in ("a..b", f"{'a' * 64}.b"):
        assert "cannot be reached" in str(Rendezvous(lambda _: None)._try(HubAddress(address, 9), INFO))
