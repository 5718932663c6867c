"""Agreement of ranks through the store alone, so that no collective of training is ever disturbed.

`publish`, `hand_in`, `collect` and `delete` never wait, so a background thread may call them: a wait would hold the
connection to the store, which the training loop may need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import UnionType
from typing import TYPE_CHECKING, TypeVar

from phalanx import messages
from phalanx.errors import ForeignData, PeerFailed, PhalanxError, UsageError
from phalanx.messages import Name
from phalanx.store.join import Claim
from phalanx.store.primitives import SOURCE, read, wait_for, write

if TYPE_CHECKING:
    from torch.distributed import Store

_MOST_CHARACTERS = 1 << 22
"""Characters in one key; torch's store takes 8 MB."""
_MOST_KEYS = 4096
T = TypeVar("T")


class Coordinator:
    """The ranks that do something together, step by step, in the same order on all of them."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        claims: Sequence[Claim],
        task: str,
        error: type[PhalanxError],
    ) -> None:
        """``task`` completes "has died while …"; an ``error`` of rank 0 is raised on all ranks."""
        self.rank, self.size = rank, size
        self._store, self._claims, self._task, self._error = store, claims, task, error
        self._turn = self._cleared = 0

    # ---- without waiting

    def publish(self, key: str, value: object) -> None:
        write(self._store, key, value)

    def hand_in(self, key: str, content: object) -> bool:
        """Writes this rank's part of something. Returns True if it is the last of all ranks."""
        text = json.dumps(content)
        pieces = [text[at : at + _MOST_CHARACTERS] for at in range(0, len(text), _MOST_CHARACTERS)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{self.rank}/{number}", piece)
        self.publish(f"{key}/{self.rank}", len(pieces))
        return self._store.add(f"{key}/count", 1) == self.size

    def collect(self, key: str) -> list[object]:
        """Returns and deletes all parts, by rank; None for a damaged one. For the last rank of `hand_in` alone."""
        found: list[object] = []
        for rank in range(self.size):
            keys = self._pieces(f"{key}/{rank}")
            found.append(_parsed(b"".join(self._store.get(each) for each in keys)))
            self.delete(*keys, f"{key}/{rank}")
        self.delete(f"{key}/count")
        return found

    def _pieces(self, key: str) -> list[str]:
        """Returns the keys of one part; none if they are not there, because reading them would wait for ever."""
        count = _parsed(self._store.get(key))
        if type(count) is not int or not 0 < count < _MOST_KEYS:
            return []
        keys = [f"{key}/{number}" for number in range(count)]
        return keys if self._store.check(keys) else []

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._store.delete_key(key)

    def used_keys(self) -> list[str]:
        """Returns the keys of `lead` since the last call; no rank needs them once all ranks have come this far."""
        before, self._cleared = self._cleared, self._turn
        return [f"turn {number}" for number in range(before, self._turn)]

    # ---- waiting

    def await_value(self, key: str, shape: type[T], while_waiting: Callable[[], None] = lambda: None) -> T:
        """Waits for what a rank publishes under ``key``; PeerFailed if a rank dies before that."""
        from torch.distributed import DistNetworkError

        def died(_: float) -> PeerFailed | None:
            while_waiting()
            dead = next((claim for claim in self._claims if claim.has_died), None)
            return PeerFailed(f"{dead} has died while {self._task}; see its log.") if dead is not None else None

        try:
            wait_for(self._store, key, look=died)
            return read(self._store, key, shape)
        except DistNetworkError:
            raise PeerFailed(f"the store of the run was lost while {self._task}.") from None
        except ForeignData:
            raise self._foreign() from None

    def lead(self, work: Callable[[], T], shape: type[T] | UnionType) -> T:
        """Runs ``work`` on rank 0, and returns its result on all ranks, or raises the same error."""
        key = self._next_turn()
        if self.size == 1:
            return work()
        if self.rank == 0:
            try:
                result = work()
            except (self._error, UsageError, OSError) as error:
                self.publish(key, (type(error).__name__, str(error)))
                raise
            self.publish(key, ("", result))
            return result
        kind, value = self.await_value(key, tuple[Name, object])
        if kind:
            raise (UsageError if kind == "UsageError" else self._error)(str(value))
        try:
            return messages.fit(value, shape, SOURCE)
        except ForeignData:
            raise self._foreign() from None

    def gather(self, value: T, shape: type[T]) -> list[T] | None:
        """Returns the values of all ranks, by rank, on rank 0."""
        key = self._next_turn()
        if self.rank != 0:
            self.publish(f"{key}/{self.rank}", value)
            return None
        found = [value]
        for rank in range(1, self.size):
            found.append(self.await_value(f"{key}/{rank}", shape))
            self.delete(f"{key}/{rank}")
        return found

    def _next_turn(self) -> str:
        self._turn += 1
        return f"turn {self._turn - 1}"

    def _foreign(self) -> PhalanxError:
        return self._error("the run's store does not hold what the ranks have written there.")


def _parsed(content: bytes) -> object:
    """Returns None for what is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
