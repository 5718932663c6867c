"""`shard`: an iterable dataset, split among the ranks and their DataLoader workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from phalanx.argparser import shown
from phalanx.data.position import find_position
from phalanx.errors import UsageError

T = TypeVar("T")


class ShardedIterable(IterableDataset[T]):
    """One rank's part of an iterable: every element goes to one worker of one rank; `shard` makes it."""

    def __init__(self, iterable: Iterable[T], num_replicas: int, rank: int) -> None:
        self.iterable = iterable
        self.num_replicas = num_replicas
        self.rank = rank

    def __iter__(self) -> Iterator[T]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        first = self.rank + self.num_replicas * worker
        return itertools.islice(self.iterable, first, None, self.num_replicas * workers)

    def __len__(self) -> int:
        """Of this rank, over all its workers. Like any object without a length, TypeError if the iterable has none."""
        if not isinstance(self.iterable, Sized):
            raise TypeError(f"object of type {type(self.iterable).__name__!r} has no len()")
        return len(range(self.rank, len(self.iterable), self.num_replicas))


def shard(iterable: Iterable[T], num_replicas: int | None = None, rank: int | None = None) -> ShardedIterable[T]:
    """An IterableDataset with this rank's part of ``iterable``: element i goes to rank i mod the number of ranks.

    Within a rank the elements go to the DataLoader's workers in turn, so each comes exactly once over all ranks and
    workers, and no rank has more than one above another. Every process goes through the whole iterable and keeps its
    part: it has to give the same elements in the same order everywhere, and must not split itself.

    Args:
        iterable: for DataLoader workers that are spawned it has to be picklable. A generator can be gone through once.
        num_replicas, rank: given, or those of the process group when this is called; a world of one without a group.
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise UsageError(f"iterable is {shown(iterable)}; give something that can be iterated over.")
    replicas, own = find_position(num_replicas, rank)
    return ShardedIterable(iterable, replicas, own)
