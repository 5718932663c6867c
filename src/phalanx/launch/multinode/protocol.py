"""The messages of a run on several nodes: between an agent and its keeper, and between the keepers of the nodes.

An agent gives its keeper orders (`Order`) and hears events (`Event`). The keepers send each other `LinkMessage`s over
sealed connections (links.py). What the watchdogs have to say travels in `Published` as bytes that only they read.
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
    """Not all nodes of a round have signed in."""


class NodeInfo(Record, frozen=True):
    """One node, as it describes itself to the others."""

    node: Annotated[int, Meta(ge=-1, lt=1 << 20)]
    """-1: it has not been given a number yet."""
    host: Name
    address: Name
    nproc: Annotated[int, Meta(ge=1, le=1 << 16)]
    nnodes: NodeCount
    """How many there are in this round."""
    asked: Name
    """The value of --nnodes: N or MIN:MAX."""
    max_restarts: Count
    run_id: Name
    torch: Name
    phalanx: Name
    directory: Text
    """Its run directory."""
    attempt: Count = 0
    """The next one that it knows of. A node that comes late takes the number of the others."""
    serves: bool = False
    """It has the store and the connections to all others: without this node nobody hears anything."""

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
    """Why two nodes cannot be in one run; None when they can."""
    for name, (word, advice) in _MUST_AGREE.items():
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours != theirs:
            return f"{one} has {word} {ours}, but {other} has {theirs}; {advice}."
    return None


class Terms(Record, frozen=True):
    """How many nodes to wait for, and how long."""

    fewest: NodeCount
    most: NodeCount
    timeout: Seconds
    last_call: Seconds


# ---- between the nodes, about one attempt


class MasterAt(Message, frozen=True):
    """Where the workers of this attempt meet; from the first node."""

    attempt: Count
    address: Name
    port: Port


class Stop(Message, frozen=True):
    """All nodes end this attempt; ``for_good``: there is no other one. The first reason is the one that counts."""

    attempt: Count
    why: Text
    for_good: bool


class Endings(Message, frozen=True):
    """How the ranks of one node ended."""

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
    """The serving node takes this one in."""


class Refused(Message, frozen=True):
    """This node, or the whole run, cannot begin."""

    text: Text


class SignIn(Message, frozen=True):
    """The node takes part in this round."""

    round: Name
    info: NodeInfo


class Arrived(Message, frozen=True):
    """So many nodes have signed in."""

    count: Count


class Met(Message, frozen=True):
    """All nodes of the round have signed in."""

    round: Name
    nodes: tuple[NodeInfo, ...]


class Missing(Message, frozen=True):
    """Not all nodes of the round have signed in in time."""

    round: Name
    text: Text


class Relayed(Message, frozen=True):
    """A post of one node, passed on by the serving node."""

    node: Rank
    post: Post


class NodeLost(Message, frozen=True):
    """A node is gone, and how that was noticed."""

    node: Rank
    text: Text


class Leaving(Message, frozen=True):
    """This node leaves. Its agent has ended or was killed."""


class Over(Message, frozen=True):
    """The run has ended."""

    exit_code: ExitCode


class Beat(Message, frozen=True):
    """A sign of life."""


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


class BeginAttempt(Message, frozen=True):
    attempt: Count


class Leave(Message, frozen=True):
    """The agent's last order. Without an exit code, this node leaves a run that has not ended."""

    exit_code: ExitCode | None


Order = Meet | BeginAttempt | Stop | Endings | Published | Leave


# ---- from the keeper to its agent


class Waiting(Message, frozen=True):
    """So many nodes are there. ``under_way``: the run continues without this one."""

    count: Count
    waited: Count
    under_way: bool = False


class Notice(Message, frozen=True):
    """A line for the console."""

    text: Text


class Ignored(Message, frozen=True):
    """A line for the event file: what was received does not come from this run."""

    text: Text


class Joined(Message, frozen=True):
    """This node has met the others, and this is its number."""

    node: Rank
    nodes: tuple[NodeInfo, ...]


class Settled(Message, frozen=True):
    """How the ranks of all nodes ended."""

    endings: tuple[Ending, ...]


class Goodbye(Message, frozen=True):
    """The keeper's last event."""


Event = Waiting | Notice | Ignored | Joined | Refused | Over | MasterAt | Stop | Relayed | NodeLost | Settled | Goodbye


def send(channel: Channel, record: Order | Event) -> None:
    """Raises OSError when the other side is gone."""
    channel.send(record)


def receive_order(channel: Channel) -> Order:
    """The agent's next order; the last one if the agent is gone."""
    received = channel.receive(Order)
    return Leave(None) if received is None else received[0]


def receive_event(channel: Channel) -> Event | None:
    """None when the keeper is gone."""
    received = channel.receive(Event)
    return None if received is None else received[0]
