"""`shard`: an iterable dataset, split among the ranks and their DataLoader workers; which part is this rank's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from phalanx import world as worlds
from phalanx.argparser import shown, whole_number
from phalanx.errors import UsageError

T = TypeVar("T")


class ShardedIterable(IterableDataset[T]):
    """One rank's part of an iterable: every element goes to one worker of one rank."""

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
        """Returns the length for this rank, over all its workers; TypeError if the iterable has none."""
        if not isinstance(self.iterable, Sized):
            raise TypeError(f"object of type {type(self.iterable).__name__!r} has no len()")
        return len(range(self.rank, len(self.iterable), self.num_replicas))


def shard(iterable: Iterable[T], num_replicas: int | None = None, rank: int | None = None) -> ShardedIterable[T]:
    """Returns a dataset with this rank's part of ``iterable``: element i goes to rank i mod the number of ranks.

    Within a rank the elements go to the DataLoader's workers in turn, so each comes exactly once over all ranks and
    workers, and no rank has more than one above another. Every process iterates over the whole iterable and keeps its
    part: it has to give the same elements in the same order everywhere, and must not split itself.

    Args:
        iterable: for DataLoader workers that are spawned it has to be picklable. A generator can be used once.
        num_replicas, rank: given, or those of the process group when this is called; a world of one without a group.
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise UsageError(f"iterable is {shown(iterable)}; give something that can be iterated over.")
    replicas, own = find_position(num_replicas, rank)
    return ShardedIterable(iterable, replicas, own)


def find_position(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns the number of ranks and this rank: given, or those of the process group; 1 and 0 without a group.

    A process that a launcher has started as one of several, and that has not joined them yet, is an error: in a world
    of one, every rank would see every sample.
    """
    num_replicas = num_replicas if num_replicas is None else whole_number("num_replicas", num_replicas)
    rank = rank if rank is None else whole_number("rank", rank)
    if num_replicas is None or rank is None:
        world = worlds.current()
        size, own = world.size, world.rank
        if dist.is_available() and dist.is_initialized():
            size, own = dist.get_world_size(), dist.get_rank()
        if size == 1 and rank is None and num_replicas not in (None, 1):
            raise UsageError(f"num_replicas={num_replicas} was given without a rank; give rank=… as well.")
        if size == 1 and num_replicas is None and rank not in (None, 0):
            raise UsageError(f"rank={rank} was given without num_replicas; give num_replicas=… as well.")
        num_replicas = size if num_replicas is None else num_replicas
        rank = own if rank is None else rank
    if num_replicas < 1:
        raise UsageError(f"num_replicas is {num_replicas}; give 1 or more.")
    if not 0 <= rank < num_replicas:
        raise UsageError(f"rank is {rank}, but there are {num_replicas} ranks; give 0 to {num_replicas - 1}.")
    return num_replicas, rank
