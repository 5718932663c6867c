"""The two ends of the connections between nodes: the `Hub` of the node that serves the store, a `Spoke` on each other.

The hub signs nodes in, relays their messages, and notices which node is lost.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time

from phalanx.launch.multinode import protocol
from phalanx.launch.multinode.links import SILENCE, Connection, LinkThread, Receiver, ServerLost
from phalanx.launch.multinode.protocol import LinkMessage, NodeInfo, Post

_MOST_UNAUTHENTICATED = 64
"""Connections that have not proved to know the secret; the oldest is closed for a new one."""
_AGENT_ENDED = "its agent has ended or was killed"


class Hub(LinkThread):
    """The connections of the serving node. It accepts every node that knows the secret, and gives no node a number."""

    def __init__(self, listener: socket.socket, own: NodeInfo, is_elastic: bool, receiver: Receiver) -> None:
        """``is_elastic``: a node that does not fit is rejected; otherwise the run cannot begin."""
        super().__init__(receiver)
        listener.setblocking(False)
        self._listener, self._own, self._is_elastic = listener, own, is_elastic
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._signed: dict[str, dict[int, tuple[NodeInfo, Connection | None]]] = {}
        """The nodes of each round that have signed in; this node has no connection."""
        self._members: dict[int, Connection | None] = {}
        self._lost: set[int] = set()
        self.rejected: set[str] = set()
        """Addresses of connections that did not prove to know the secret."""
        self._thread.start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    # ---- from other threads

    def sign_in(self, name: str, info: NodeInfo) -> None:
        """Signs this node in to a round."""
        self._own = info
        self._call(lambda: self._sign_in(protocol.SignIn(name, info), None))

    def give_up(self, name: str, seconds: float) -> None:
        """Ends a round: nodes that have not signed in by now are missing."""
        self._call(lambda: self._give_up(name, seconds))

    def post(self, post: Post) -> None:
        """Sends it to all nodes of the round."""
        self._call(lambda: self._relay(self._own.node, post))

    # ---- on the thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again, or there is no descriptor left
            connection = Connection(self._listener.accept()[0], is_hub=True)
            unknown = [one for one in self._connections if not one.is_known]
            if len(unknown) >= _MOST_UNAUTHENTICATED:
                self._drop(unknown[0], "too many connections")
            self._add(connection)

    def _handle(self, connection: Connection, message: LinkMessage) -> None:
        match message:
            case protocol.Hello(info):
                self._greet(connection, info)
            case protocol.SignIn():
                self._sign_in(message, connection)
            case protocol.MasterAt() | protocol.Stop() | protocol.Endings() | protocol.Published():
                if connection.node is not None and self._members.get(connection.node) is connection:
                    self._relay(connection.node, message)
            case protocol.Leaving():
                self._drop(connection, _AGENT_ENDED)
            case _:
                pass  # a heartbeat

    def _greet(self, connection: Connection, info: NodeInfo) -> None:
        problem = protocol.disagreement(info, self._own)
        if problem is None:
            connection.send(protocol.Welcome())
            return
        connection.send(protocol.Refused(problem))
        if not self._is_elastic:
            for other in self._connections:
                other.send(protocol.Refused(problem))
            self._deliver(protocol.Refused(problem))

    def _sign_in(self, message: protocol.SignIn, connection: Connection | None) -> None:
        signed, info = self._signed.setdefault(message.round, {}), message.info
        if info.node in signed:
            problem = f"two nodes were given --node-rank {info.node}: {signed[info.node][0]} and {info.host}."
            for refused in (connection, *(one for _, one in signed.values())):
                self._send(refused, protocol.Refused(problem))
            return
        if connection is not None:
            connection.node = info.node
        signed[info.node] = info, connection
        if len(signed) < info.nnodes:
            for _, one in signed.values():
                self._send(one, protocol.Arrived(len(signed)))
            return
        del self._signed[message.round]
        self._lost.clear()
        self._members = {node: one for node, (_, one) in signed.items()}
        nodes = tuple(found for _, (found, _) in sorted(signed.items()))
        for one in self._members.values():
            self._send(one, protocol.Met(message.round, nodes))

    def _give_up(self, name: str, seconds: float) -> None:
        signed = self._signed.pop(name, {})
        if not signed:
            return  # they have just met
        nnodes = self._own.nnodes
        missing = [node for node in range(nnodes) if node not in signed]
        has = "have" if len(missing) > 1 else "has"
        text = (
            f"after {seconds:g} s node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {nnodes} {has} not "
            "come; start the same command there with its --node-rank, or wait longer with --rdzv-timeout."
        )
        for _, one in signed.values():
            self._send(one, protocol.Missing(name, text + self.secret_hint()))

    def secret_hint(self) -> str:
        """Returns what to add to an error when nodes are missing."""
        if not self.rejected:
            return ""
        return (
            f" There was a connection from {', '.join(sorted(self.rejected)[:5])} with another secret, or without "
            "one: give all nodes the same --secret-file."
        )

    def _relay(self, node: int, post: Post) -> None:
        message = protocol.Relayed(node, post)
        is_for_all = not isinstance(post, protocol.Published) or post.to_all
        for member, connection in self._members.items():
            if member != node and (is_for_all or connection is None):
                self._send(connection, message)

    def _send(self, connection: Connection | None, message: LinkMessage) -> None:
        if connection is None:
            self._deliver(message)
        elif connection in self._connections:
            connection.send(message)

    def _has_lost(self, connection: Connection, text: str, is_foreign: bool) -> None:
        if is_foreign and not connection.is_known and len(self.rejected) < _MOST_UNAUTHENTICATED:
            self.rejected.add(connection.address)
        for signed in self._signed.values():
            for node in [node for node, (_, one) in signed.items() if one is connection]:
                del signed[node]
        node = connection.node
        if node is not None and self._members.get(node) is connection and node not in self._lost:
            self._lost.add(node)
            for one in self._members.values():
                self._send(one, protocol.NodeLost(node, text))

    def _begin_leaving(self, exit_code: int | None, deadline: float) -> None:
        """Informs the others. After the end of a run the serving node stays until they have left."""
        self._selector.unregister(self._listener)
        self._listener.close()
        members = set(map(id, self._members.values()))
        for connection in self._connections:
            if exit_code is None and self._own.node in self._members:
                connection.send(protocol.NodeLost(self._own.node, _AGENT_ENDED))
            elif exit_code is not None and id(connection) not in members:
                connection.send(protocol.Over(exit_code))
        self._leave_by = deadline if exit_code is not None else min(deadline, time.monotonic() + 0.5)


class Spoke(LinkThread):
    """The connection of any other node to the serving one."""

    def __init__(self, sock: socket.socket, own: NodeInfo, receiver: Receiver) -> None:
        super().__init__(receiver)
        self._hub = Connection(sock, is_hub=False)
        self._add(self._hub)
        self._hub.send(protocol.Hello(own))
        self._thread.start()

    def sign_in(self, name: str, info: NodeInfo) -> None:
        self._call(lambda: self._hub.send(protocol.SignIn(name, info)))

    def give_up(self, name: str, seconds: float) -> None:
        """The serving node reports which nodes are missing."""

    def secret_hint(self) -> str:
        return ""

    def post(self, post: Post) -> None:
        self._call(lambda: self._hub.send(post))

    def _begin_leaving(self, exit_code: int | None, deadline: float) -> None:
        self._hub.send(protocol.Leaving())
        self._leave_by = deadline

    def _may_end(self) -> bool:
        return super()._may_end() or (self._leave_by is not None and self._hub.has_sent_all)

    def _handle(self, connection: Connection, message: LinkMessage) -> None:
        if not isinstance(message, protocol.Beat):
            self._deliver(message)

    def _has_lost(self, connection: Connection, text: str, is_foreign: bool) -> None:
        silent = "no sign of life" in text
        why = f"has not answered for {SILENCE:g} s" if silent else f"does not answer any more ({text})"
        self._deliver(ServerLost(f"its store {why}"))
