"""The messages of a run on several nodes: between an agent and its keeper, and between the keepers of the nodes.

An agent (peers.py) sends its keeper an `Order`, the keeper (keeper_session.py) sends back an `Event`. The keepers send
each other a `LinkMessage` over sealed connections (links.py). `Published` carries bytes that only watchdogs decode.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from phalanx.errors import JoinError
from phalanx.events import Ending
from phalanx.fd_channel import Channel
from phalanx.messages import Count, ExitCode, Message, Name, Port, Rank, Record, Seconds, Text
from phalanx.watchdog.exchange import Topic

NodeCount = Annotated[int, Meta(ge=1, lt=1 << 20)]


class NodesMissing(JoinError):
    """A node of the round has not signed in."""


class NodeInfo(Record, frozen=True):
    """One node, as it describes itself to the others."""

    node: Annotated[int, Meta(ge=-1, lt=1 << 20)]
    """The node's number; -1 until it has one."""
    host: Name
    address: Name
    nproc: Annotated[int, Meta(ge=1, le=1 << 16)]
    nnodes: NodeCount
    """The number of nodes in this round."""
    asked: Name
    """The value of --nnodes: N or MIN:MAX."""
    max_restarts: Count
    run_id: Name
    torch: Name
    phalanx: Name
    directory: Text
    """Its run directory."""
    attempt: Count = 0
    """The number of its next attempt. A node that joins late takes the number of the others."""
    serves: bool = False
    """It serves the store and the connections to all others: without this node no message arrives."""

    def __str__(self) -> str:
        if self.node < 0:
            return f"host {self.host} ({self.address})"
        return f"node {self.node} (host {self.host}, {self.address})"


_MUST_AGREE = {
    "asked": ("--nnodes", "give all nodes the same"),
    "max_restarts": ("--max-restarts", "give all nodes the same"),
    "run_id": ("--rdzv-id", "another run uses this port; give each run a port of its own"),
    "torch": ("torch", "install the same on all nodes"),
    "phalanx": ("phalanx", "install the same on all nodes"),
}


def disagreement(one: NodeInfo, other: NodeInfo) -> str | None:
    """Returns why two nodes cannot be in one run; None if they can."""
    for name, (label, advice) in _MUST_AGREE.items():
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours != theirs:
            return f"{one} has {label} {ours}, but {other} has {theirs}; {advice}."
    return None


class Terms(Record, frozen=True):
    """The number of nodes to wait for, and the time."""

    fewest: NodeCount
    most: NodeCount
    timeout: Seconds
    last_call: Seconds


# ---- between the nodes, about one attempt


class MasterAt(Message, frozen=True):
    """The address of the workers' store in this attempt, from the first node."""

    attempt: Count
    address: Name
    port: Port


class Stop(Message, frozen=True):
    """All nodes end this attempt; with ``for_good`` it is the last. The first reason counts."""

    attempt: Count
    why: Text
    for_good: bool


class Endings(Message, frozen=True):
    """The ends of the ranks of one node."""

    attempt: Count
    endings: tuple[Ending, ...]


class Published(Message, frozen=True):
    """A watchdog's message to the watchdogs of the other nodes, or of the serving node alone."""

    attempt: Count
    topic: Topic
    body: bytes
    to_all: bool = True


Post = MasterAt | Stop | Endings | Published


# ---- between the nodes, about the round


class Hello(Message, frozen=True):
    """The first message to the serving node."""

    info: NodeInfo


class Welcome(Message, frozen=True):
    """The serving node accepts this one."""


class Refused(Message, frozen=True):
    """This node, or the whole run, cannot begin."""

    text: Text


class SignIn(Message, frozen=True):
    """The node takes part in this round."""

    round: Name
    info: NodeInfo


class Arrived(Message, frozen=True):
    """The number of nodes that have signed in."""

    count: Count


class Met(Message, frozen=True):
    """All nodes of the round have signed in."""

    round: Name
    nodes: tuple[NodeInfo, ...]


class Missing(Message, frozen=True):
    """Nodes of the round have not signed in in time."""

    round: Name
    text: Text


class Relayed(Message, frozen=True):
    """A post of one node, relayed by the serving node."""

    node: Rank
    post: Post


class NodeLost(Message, frozen=True):
    """A node is lost; the text says how that was noticed."""

    node: Rank
    text: Text


class Leaving(Message, frozen=True):
    """This node leaves. Its agent has ended or was killed."""


class Over(Message, frozen=True):
    """The run has ended."""

    exit_code: ExitCode


class Beat(Message, frozen=True):
    """A heartbeat."""


LinkMessage = (
    Hello | Welcome | Refused | SignIn | Arrived | Met | Missing | Relayed | NodeLost | Leaving | Over | Beat | Post
)


# ---- from the agent to its keeper


class Meet(Message, frozen=True):
    """Find the other nodes, at this address."""

    info: NodeInfo
    host: Name
    port: Port
    elastic: bool
    terms: Terms


class OpenMaster(Message, frozen=True):
    """Open the workers' store of this attempt; for the first node."""

    attempt: Count


class Leave(Message, frozen=True):
    """The agent's last order. Without an exit code, this node leaves a run that has not ended."""

    exit_code: ExitCode | None


Order = Meet | OpenMaster | Stop | Endings | Published | Leave


# ---- from the keeper to its agent


class Waiting(Message, frozen=True):
    """The number of nodes that are there. ``under_way``: the run continues without this one."""

    count: Count
    waited: Count
    under_way: bool = False


class Notice(Message, frozen=True):
    """A line for the console."""

    text: Text


class Ignored(Message, frozen=True):
    """A line for the event file about a message that is not of this run."""

    text: Text


class Joined(Message, frozen=True):
    """All nodes have met; ``node`` is the number of this one."""

    node: Rank
    nodes: tuple[NodeInfo, ...]


class Goodbye(Message, frozen=True):
    """The keeper's last event."""


Event = Waiting | Notice | Ignored | Met | Joined | Refused | Over | Relayed | NodeLost | Goodbye


def receive_order(channel: Channel) -> Order:
    """Returns the agent's next order; `Leave` if the agent is gone."""
    received = channel.receive(Order)
    return Leave(None) if received is None else received[0]


def receive_event(channel: Channel) -> Event | None:
    """Returns the keeper's next event; None if the keeper is gone."""
    received = channel.receive(Event)
    return None if received is None else received[0]
