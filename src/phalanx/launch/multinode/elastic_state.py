"""The state of torch's dynamic rendezvous in the store: a sealed record, and never a pickle.

torch's own backend unpickles what it finds in the store, where anybody may write. This one translates in both
directions: what torch unpickles was pickled in this process.
"""

from __future__ import annotations

import pickle
import threading
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from phalanx import messages
from phalanx.errors import ForeignData
from phalanx.messages import Count, Name, Pid, Rank, Record
from phalanx.torch_compat.c10d import ELASTIC_NODE, ELASTIC_STATE

_STORE = "the store where the nodes meet"
_DIGITS = 16
"""Digits of the number of a state, before its seal."""
_TorchState = Any
"""torch's _RendezvousState, and below it _NodeDesc; both are private."""
_TorchNode = Any


class _Node(Record, frozen=True):
    addr: Name
    pid: Pid
    local_id: Rank


class _State(Record, frozen=True):
    """The fields of torch's _RendezvousState; times are in ISO format."""

    round: Count
    complete: bool
    deadline: Name | None
    closed: bool
    participants: tuple[tuple[_Node, Rank], ...]
    wait_list: tuple[_Node, ...]
    redundancy_list: tuple[_Node, ...]
    last_heartbeats: tuple[tuple[_Node, Name], ...]


class SealedBackend(RendezvousBackend):
    """Seals the states of torch's own backend. Each has a higher number than the one that it replaces."""

    def __init__(self, backend: RendezvousBackend, key: str) -> None:
        self._backend, self._key = backend, key
        self._last = 0
        self._lock = threading.Lock()
        """One request at a time: torch's threads must see the states in their order."""

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, object] | None:
        with self._lock:
            found = self._backend.get_state()
            return None if found is None else (pickle.dumps(self._open(found[0])), found[1])

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, object, bool] | None:
        with self._lock:
            payload, number = _encode(pickle.loads(state)), self._last + 1
            sealed = f"{number:0{_DIGITS}d}".encode() + messages.seal(self._key, number, payload)
            found = self._backend.set_state(sealed, token)
            return None if found is None else (pickle.dumps(self._open(found[0])), found[1], found[2])

    def read(self) -> _TorchState | None:
        """Returns the state without changing it; None if there is none."""
        with self._lock:
            found = self._backend.get_state()
            return None if found is None else self._open(found[0])

    def _open(self, data: bytes) -> _TorchState:
        """Rejects a state that was not written by this run, or is older than one that was seen before."""
        try:
            number = int(data[:_DIGITS])
            payload = messages.open_sealed(self._key, number, data[_DIGITS:], _STORE)
            if number < self._last:
                raise ValueError(f"{_STORE} holds a state of the rendezvous that was replaced before.")
            state = _decode(payload)
        except ForeignData as error:
            raise RendezvousStateError(str(error)) from None
        except ValueError as error:
            text = f"{_STORE} holds what phalanx did not write there ({error}); somebody else can write to it."
            raise RendezvousStateError(text) from None
        self._last = number
        return state


def _encode(state: _TorchState) -> bytes:
    content = _State(
        round=state.round,
        complete=state.complete,
        deadline=state.deadline.isoformat() if state.deadline is not None else None,
        closed=state.closed,
        participants=tuple((_node(found), rank) for found, rank in sorted(state.participants.items())),
        wait_list=tuple(map(_node, sorted(state.wait_list))),
        redundancy_list=tuple(map(_node, sorted(state.redundancy_list))),
        last_heartbeats=tuple((_node(found), at.isoformat()) for found, at in sorted(state.last_heartbeats.items())),
    )
    return messages.encode(content)


def _node(found: _TorchNode) -> _Node:
    return _Node(found.addr, found.pid, found.local_id)


def _decode(data: bytes) -> _TorchState:
    def node(found: _Node) -> _TorchNode:
        return ELASTIC_NODE.get()(found.addr, found.pid, found.local_id)

    def parse_time(text: str) -> datetime:
        found = datetime.fromisoformat(text)
        # torch compares it with its own times, which have a zone in newer versions; to mix both kinds is an error.
        if (found.tzinfo is not None) != hasattr(dynamic_rendezvous, "timezone"):
            raise ValueError(f"{text!r} where a time belongs")
        return found

    content = messages.decode(data, _State, _STORE)
    state = ELASTIC_STATE.get()()
    state.round, state.complete, state.closed = content.round, content.complete, content.closed
    state.deadline = parse_time(content.deadline) if content.deadline is not None else None
    state.participants = {node(found): rank for found, rank in content.participants}
    state.wait_list = set(map(node, content.wait_list))
    state.redundancy_list = set(map(node, content.redundancy_list))
    state.last_heartbeats = {node(found): parse_time(at) for found, at in content.last_heartbeats}
    return state
