"""How the ranks of a checkpointer agree: through the store alone, so that no collective of training is ever met.

What a background thread does here never waits. A wait holds the connection to the store, and the training loop may
need it. Everything in the store is JSON, and is checked before it is used: others may be able to write there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx import world as worlds
from phalanx.errors import CheckpointError, PeerFailed, UsageError
from phalanx.store import tcp_store
from phalanx.store.join import wait_for

_SLICE = 2.0
_MOST_A_KEY = 1 << 22
"""Characters; torch's store takes 8 MB in one value."""
_MOST_KEYS = 4096
_numbers = itertools.count()
"""Numbers of the checkpointers in this process: every rank makes the same ones in the same order."""
T = TypeVar("T")


class Coordinator:
    """The ranks that save and load together."""

    def __init__(self) -> None:
        from torch.distributed import PrefixStore

        self.world = worlds.current()
        self.rank, self.size = self.world.rank, self.world.size
        shared = self.world.store if self.world.store is not None else tcp_store.private()
        self._store: Any = PrefixStore(f"phalanx/checkpoint-{next(_numbers)}", shared)
        self._turn = self._turn_of_save = 0

    # ---- without waiting

    def tell(self, key: str, content: Any) -> None:
        self._store.set(key, json.dumps(content))

    def hand_in(self, key: str, content: Any) -> bool:
        """This rank's part of something; whether all others have handed in theirs."""
        text = json.dumps(content)
        pieces = [text[at : at + _MOST_A_KEY] for at in range(0, len(text), _MOST_A_KEY)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{self.rank}/{number}", piece)
        self._store.set(f"{key}/{self.rank}", str(len(pieces)))
        return self._store.add(f"{key}/count", 1) == self.size

    def collect(self, key: str) -> list[Any]:
        """All parts, by rank; None for a damaged one. For the one that was told by `hand_in` that it was the last."""
        found = []
        for rank in range(self.size):
            keys = self._pieces(f"{key}/{rank}")
            found.append(_parsed(b"".join(self._store.get(each) for each in keys)))
            self.delete(*keys, f"{key}/{rank}")
        self.delete(f"{key}/count")
        return found

    def _pieces(self, key: str) -> list[str]:
        """The keys of what was handed in; none if they are not there, for to wait for them would be for ever."""
        count = _parsed(self._store.get(key))
        if type(count) is not int or not 0 < count < _MOST_KEYS:
            return []
        keys = [f"{key}/{number}" for number in range(count)]
        return keys if self._store.check(keys) else []

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._store.delete_key(key)

    def begin_save(self) -> list[str]:
        """Keys that no rank needs any more once all ranks have handed in their shares of the save that begins."""
        before, self._turn_of_save = self._turn_of_save, self._turn
        return [f"turn {number}" for number in range(before, self._turn)]

    # ---- waiting

    def hear(self, key: str, kind: type[T], while_waiting: Callable[[float], None] = lambda _: None) -> T:
        """What is told under ``key``, as soon as it is; PeerFailed if a rank dies before.

        ``while_waiting`` is called with the seconds of each piece of the wait.
        """
        from torch.distributed import DistNetworkError

        try:
            while not wait_for(self._store, key, _SLICE):
                for claim in self.world.claims:
                    if claim.has_died and not self._store.check([key]):
                        raise PeerFailed(f"{claim} has died while a checkpoint was being agreed on; see its log.")
                while_waiting(_SLICE)
            found = _parsed(self._store.get(key))
        except DistNetworkError:
            raise PeerFailed("the store of the run was lost while a checkpoint was being agreed on.") from None
        if not isinstance(found, kind):
            raise CheckpointError("the run's store has something else than what the ranks have agreed on there.")
        return found

    def lead(self, work: Callable[[], Any]) -> Any:
        """Rank 0 does it, and all get the result, or the same error."""
        key = self._next_turn()
        if self.size == 1:
            return work()
        if self.rank == 0:
            try:
                result = work()
            except (CheckpointError, UsageError, OSError) as error:
                self.tell(key, [type(error).__name__, str(error)])
                raise
            self.tell(key, ["", result])
            return result
        match self.hear(key, list):
            case ["", result]:
                return result
            case [str(kind), str(text)]:
                raise (UsageError if kind == "UsageError" else CheckpointError)(text)
        raise CheckpointError("the run's store does not hold what rank 0 has written there.")

    def gather(self, content: str) -> list[str] | None:
        """To rank 0: what every rank has said, by rank."""
        key = self._next_turn()
        if self.rank != 0:
            self.tell(f"{key}/{self.rank}", content)
            return None
        found = [content]
        for rank in range(1, self.size):
            found.append(self.hear(f"{key}/{rank}", str))
            self.delete(f"{key}/{rank}")
        return found

    def _next_turn(self) -> str:
        self._turn += 1
        return f"turn {self._turn - 1}"


def _parsed(content: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
