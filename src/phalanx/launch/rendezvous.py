"""Where the nodes of a run meet, and what they tell each other afterwards: torch's store, on the first node.

This runs in the keeper of each node, which has torch; the agent, which has not, talks to it through their channel.
The store holds three things: the book where each node signs in, a page for each attempt (where its workers meet, that
it has to stop, why its ranks stand still, how each node's ranks ended), and each node's sign of life. They stand under
the name of the round: one for the whole run when nodes have numbers from the start, and one for each attempt when they
come and go.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from phalanx import plain
from phalanx.errors import ForeignData, JoinError
from phalanx.launch.docket import Docket

_SLICE = 1.0
_LOOK_EVERY = 0.05
_MOST_RANKS = 1 << 16
"""Of one node."""


@dataclass(frozen=True)
class NodeCard:
    """What a node says about itself when it signs in."""

    node: int
    host: str
    address: str
    nproc: int
    nnodes: int
    """How many there are in this round."""
    asked: str
    """What it was told: N or MIN:MAX."""
    max_restarts: int
    run_id: str
    torch: str
    phalanx: str
    directory: str
    """Its run directory."""
    attempt: int = 0
    """The next one that it knows of. A node that comes late goes on with the others' number."""
    serves: bool = False
    """It has the store: without this node nobody can be told anything."""

    def __str__(self) -> str:
        if self.node < 0:  # not numbered yet
            return f"host {self.host} ({self.address})"
        return f"node {self.node} (host {self.host}, {self.address})"


_MUST_AGREE = {
    "asked": ("--nnodes", "give all nodes the same"),
    "max_restarts": ("--max-restarts", "give all nodes the same"),
    "run_id": ("--rdzv-id", "another run uses this port; give each run a port of its own"),
    "torch": ("torch", "install the same on all nodes"),
    "phalanx": ("phalanx", "install the same on all nodes"),
}


@dataclass(frozen=True)
class Round:
    """The nodes that take part, from one meeting to the next."""

    name: str
    own: NodeCard
    cards: tuple[NodeCard, ...]

    @property
    def server(self) -> int:
        """The node that has the store."""
        return next((card.node for card in self.cards if card.serves), 0)

    def within(self, store: Any) -> Any:
        """The round's own part of the store."""
        return within(store, self.name)


def within(store: Any, name: str) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


@dataclass(frozen=True)
class Stop:
    """Why an attempt has to end, and whether there is to be no other."""

    why: str
    for_good: bool


@dataclass(frozen=True)
class _Verdict:
    """On all nodes of a round; without an error they belong together."""

    error: str | None = None
    missing: bool = False


_STORE = "the store where the nodes meet"


def _card(data: bytes) -> NodeCard:
    card = plain.decode(data, NodeCard, _STORE)
    if not 0 < card.nproc <= _MOST_RANKS:
        raise ForeignData(f"{_STORE} holds a node with {card.nproc} ranks, which no machine has.")
    return card


class NodesMissing(JoinError):
    """Not all nodes of a round have signed in."""


class Book:
    """Where the nodes sign in. Whoever finds a fault writes the verdict, for all of them."""

    def __init__(self, store: Any, own: NodeCard) -> None:
        self._store, self._own = store, own

    def sign(self) -> None:
        own = self._own
        if self._store.add(f"taken/{own.node}", 1) > 1:
            wait_for(self._store, f"card/{own.node}", 2 * _SLICE)
            raise self._rule(f"two nodes were given --node-rank {own.node}: {self.card(own.node)} and {own.host}.")
        self._store.set(f"card/{own.node}", json.dumps(asdict(own)))
        complaint = self.complaint()
        if complaint:
            raise self._rule(complaint)
        if self._store.add("arrived", 1) == own.nnodes:
            self._store.set("verdict", json.dumps(asdict(_Verdict())))

    def complaint(self) -> str | None:
        """What this node has that the first one to come has not."""
        own = self._own
        first = _card(self._store.compare_set("first", "", json.dumps(asdict(own))))
        for name, (word, advice) in _MUST_AGREE.items():
            ours, theirs = getattr(own, name), getattr(first, name)
            if ours != theirs:
                return f"{own} has {word} {ours}, but {first} has {theirs}; {advice}."
        return None

    def await_verdict(self, timeout: float, tell: Callable[[int, int], None]) -> tuple[NodeCard, ...]:
        """All cards, when all have signed. ``tell`` hears, once a second, how many have and for how long it took."""
        started = time.monotonic()
        while not wait_for(self._store, "verdict", _SLICE):
            waited = time.monotonic() - started
            tell(self._store.add("arrived", 0), round(waited))
            if waited >= timeout:
                missing = [node for node in range(self._own.nnodes) if not self._store.check([f"card/{node}"])]
                names = ", ".join(map(str, missing))
                raise self._rule(
                    kind=NodesMissing,
                    text=f"after {timeout:g} s node{'s' * (len(missing) > 1)} {names} of {self._own.nnodes} "
                    f"{'have' if len(missing) > 1 else 'has'} not come; start the same command there with its "
                    "--node-rank, or wait longer with --rdzv-timeout.",
                )
        verdict = plain.decode(self._store.get("verdict"), _Verdict, _STORE)
        if verdict.error is not None:
            raise (NodesMissing if verdict.missing else JoinError)(verdict.error)
        return tuple(self.card(node) for node in range(self._own.nnodes))

    def card(self, node: int) -> NodeCard:
        return _card(self._store.get(f"card/{node}"))

    def _rule(self, text: str, kind: type[JoinError] = JoinError) -> JoinError:
        self._store.set("verdict", json.dumps(asdict(_Verdict(text, kind is NodesMissing))))
        return kind(text)


def wait_for(store: Any, key: str, seconds: float) -> bool:
    """Whether the key is there within this time. The store's own wait writes warnings when its time is over."""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_EVERY)
    return True


class Page:
    """What the nodes tell each other about one attempt."""

    def __init__(self, store: Any, attempt: int, nodes: int) -> None:
        self._store, self.attempt, self._nodes = store, attempt, nodes

    def through(self, store: Any) -> Page:
        """The same page, by way of another connection."""
        return Page(store, self.attempt, self._nodes)

    def _key(self, name: str) -> str:
        return f"attempt/{self.attempt}/{name}"

    def open_at(self, address: str, port: int) -> None:
        """The first node: its workers' store is there."""
        self._store.set(self._key("master"), json.dumps([address, port]))

    def where(self, seconds: float) -> tuple[str, int] | None:
        if not wait_for(self._store, self._key("master"), seconds):
            return None
        return plain.decode(self._store.get(self._key("master")), tuple[str, int], _STORE)

    def stop(self, why: str, for_good: bool) -> None:
        """Tells all nodes to end this attempt, and not to try another. The first reason is the one that counts."""
        self._store.compare_set(self._key("stop"), "", json.dumps(asdict(Stop(why, for_good))))

    def stopped(self) -> Stop | None:
        """The reason to stop, if there is one."""
        key = self._key("stop")
        return plain.decode(self._store.get(key), Stop, _STORE) if self._store.check([key]) else None

    @property
    def docket(self) -> Docket:
        """What is said about ranks that stand still."""
        return Docket(self._store, self._key("")[:-1], self._nodes)

    def hand_in(self, node: int, endings: list[dict[str, Any]]) -> None:
        self._store.set(self._key(f"endings/{node}"), json.dumps(endings))

    def handed_in(self, lost: set[int]) -> dict[int, list[dict[str, Any]]] | None:
        """How the ranks of all nodes ended; None while one that is not lost has not said it."""
        there = {node for node in range(self._nodes) if self._store.check([self._key(f"endings/{node}")])}
        if len(there | lost) < self._nodes:
            return None
        return {
            node: plain.decode(self._store.get(self._key(f"endings/{node}")), list[dict[str, Any]], _STORE)
            for node in sorted(there)
        }

    def sign_as_read(self, lost: int) -> None:
        """This node knows how all have ended; ``lost`` nodes will never say so."""
        if self._store.add(self._key("read"), 1) >= self._nodes - lost:
            self._store.set(self._key("all have read"), "yes")

    def await_readers(self, seconds: float) -> None:
        wait_for(self._store, self._key("all have read"), seconds)
