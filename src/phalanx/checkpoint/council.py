"""How the ranks of a checkpointer agree: through the store alone, so that no collective of training is ever met.

What a background thread does here never waits. A wait holds the connection to the store, and the training loop may
need it.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from typing import Any

from phalanx import stores
from phalanx import world as worlds
from phalanx.errors import CheckpointError, PeerFailed, UsageError
from phalanx.join import wait_for

_SLICE = 2.0
_numbers = itertools.count()
"""Of the checkpointers in this process: every rank makes the same ones in the same order."""


class Council:
    """The ranks that save and load together."""

    def __init__(self) -> None:
        from torch.distributed import PrefixStore

        self.world = worlds.current()
        self.rank, self.size = self.world.rank, self.world.size
        shared = self.world.store if self.world.store is not None else stores.private()
        self._store: Any = PrefixStore(f"phalanx/checkpoint-{next(_numbers)}", shared)
        self._turns = itertools.count()

    # ---- without waiting

    def tell(self, key: str, content: Any) -> None:
        self._store.set(key, json.dumps(content))

    def hand_in(self, key: str, content: Any) -> bool:
        """This rank's part of something; whether all others have handed in theirs."""
        self._store.set(f"{key}/{self.rank}", pickle.dumps(content))
        return self._store.add(f"{key}/count", 1) == self.size

    def collect(self, key: str) -> list[Any]:
        """All parts, by rank. For the one that was told by `hand_in` that it was the last."""
        found = [pickle.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.size)]
        for rank in range(self.size):
            self._store.delete_key(f"{key}/{rank}")
        return found

    # ---- waiting

    def hear(self, key: str, while_waiting: Callable[[float], None] = lambda _: None) -> Any:
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
            return json.loads(self._store.get(key))
        except DistNetworkError:
            raise PeerFailed("the store of the run was lost while a checkpoint was being agreed on.") from None

    def lead(self, work: Callable[[], Any]) -> Any:
        """Rank 0 does it, and all get the result, or the same error."""
        key = f"turn {next(self._turns)}"
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
        kind, result = self.hear(key)
        if kind:
            raise (UsageError if kind == "UsageError" else CheckpointError)(result)
        return result

    def gather(self, content: str) -> list[str] | None:
        """To rank 0: what every rank has said, by rank."""
        key = f"turn {next(self._turns)}"
        if self.rank != 0:
            self.tell(f"{key}/{self.rank}", content)
            return None
        return [content, *(self.hear(f"{key}/{rank}") for rank in range(1, self.size))]
