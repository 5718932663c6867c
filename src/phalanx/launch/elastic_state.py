"""The state of torch's dynamic rendezvous, as it stands in the store: plain data, and never a pickle.

torch's own backend writes a pickle there and unpickles what it finds, which is whatever somebody else has put there.
Between torch and the store this translates both ways: what is unpickled was pickled in this process.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from phalanx import plain
from phalanx.errors import ForeignData
from phalanx.torch_compat import elastic


@dataclass(frozen=True)
class _Node:
    addr: str
    pid: int
    local_id: int


@dataclass(frozen=True)
class _State:
    """torch's _RendezvousState; moments are in ISO format."""

    round: int
    complete: bool
    deadline: str | None
    closed: bool
    participants: tuple[tuple[_Node, int], ...]
    wait_list: tuple[_Node, ...]
    redundancy_list: tuple[_Node, ...]
    last_heartbeats: tuple[tuple[_Node, str], ...]


class PlainBackend:
    """A RendezvousBackend around torch's."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Any] | None:
        found = self._backend.get_state()
        return None if found is None else (pickle.dumps(_decode(found[0])), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found = self._backend.set_state(_encode(pickle.loads(state)), token)
        return None if found is None else (pickle.dumps(_decode(found[0])), found[1], found[2])

    def read(self) -> Any:
        """torch's _RendezvousState; None when there is none."""
        found = self._backend.get_state()
        return None if found is None else _decode(found[0])


def _encode(state: Any) -> bytes:
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
    return json.dumps(asdict(content)).encode()


def _node(found: Any) -> _Node:
    return _Node(found.addr, found.pid, found.local_id)


def _decode(data: bytes) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousStateError, dynamic_rendezvous

    def node(found: _Node) -> Any:
        return elastic.NODE.get()(found.addr, found.pid, found.local_id)

    def moment(text: str) -> datetime:
        found = datetime.fromisoformat(text)
        # torch compares it with its own, which have a zone in newer versions; with the other kind that fails.
        if (found.tzinfo is not None) != hasattr(dynamic_rendezvous, "timezone"):
            raise ValueError(f"{text!r} where a moment belongs")
        return found

    try:
        content = plain.decode(data, _State, "the store where the nodes meet")
        state = elastic.STATE.get()()
        state.round, state.complete, state.closed = content.round, content.complete, content.closed
        state.deadline = moment(content.deadline) if content.deadline is not None else None
        state.participants = {node(found): rank for found, rank in content.participants}
        state.wait_list = set(map(node, content.wait_list))
        state.redundancy_list = set(map(node, content.redundancy_list))
        state.last_heartbeats = {node(found): moment(at) for found, at in content.last_heartbeats}
    except (ForeignData, ValueError) as error:
        raise RendezvousStateError(str(error)) from None
    return state
