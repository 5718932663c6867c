"""`ShardSampler`: the interface of DistributedSampler, over an order that is computed and not stored."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Literal

import numpy as np
from torch.utils.data import Sampler

from phalanx.argparser import shown, whole_number
from phalanx.data.iterable import find_position
from phalanx.data.permutation import LONGEST, Permutation
from phalanx.errors import UsageError

Uneven = Literal["pad", "drop", "exact"]

_VERSION = 1
"""The version of the state and of the order: a state must mean the same samples in every later release."""

_FIRST_BLOCK, _LARGEST_BLOCK = 64, 8192
"""Indices computed at a time: the first ones come at once, and later blocks still fit into the processor's cache."""


class ShardSampler(Sampler[int]):
    """Gives every rank its part of a dataset, in an order that depends on the seed and the epoch alone.

    It repositions DistributedSampler, with the same arguments, methods and attributes. Beyond that:

    - The first index comes at once and no list of indices is stored, for any length up to 2**62.
    - ``uneven="exact"`` gives every sample to exactly one rank, as evaluation needs it.
    - A run that was stopped within an epoch resumes with `load_state_dict`, on any number of ranks.

    Position p of the order belongs to rank p mod ``num_replicas``. If the number of samples is no multiple of that,
    ``uneven="pad"`` repeats the first ones, "drop" leaves the last ones out, and "exact" gives some ranks one sample
    less than others. A dataset that is smaller than the world works too: "pad" repeats it as often as needed, "drop"
    gives no rank anything, and "exact" leaves some ranks with nothing. Of an empty one all ranks get nothing.

    Every index that this sampler has yielded counts as consumed, until `received` is called: a DataLoader with workers
    fetches ahead of the training loop. ``px.track`` calls `received` with every batch that it yields.

    If an iteration begins and `set_epoch` was not called since the last one began, the sampler takes the next epoch,
    with a warning (or, with ``shuffle=False``, the same again). That is only right if it happens on all ranks.

    Args:
        dataset: anything with a length.
        num_replicas, rank: by default those of the process group; a world of one without a group.
        shuffle: False gives the dataset's own order.
        seed: any integer, the same on all ranks.
        drop_last: DistributedSampler's name for ``uneven="drop"``.
        uneven: "pad" unless ``drop_last`` is set.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        uneven: Uneven | None = None,
    ) -> None:
        self.dataset = dataset
        self.num_replicas, self.rank = find_position(num_replicas, rank)
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed)
        self.epoch = 0
        self.uneven: Uneven = _check_uneven(uneven, drop_last)
        self.drop_last = self.uneven == "drop"
        self._length = _length(dataset)
        self._start = 0
        """The position at which iterations of this epoch begin: the samples consumed before the state was loaded."""
        self._iteration: _Iteration | None = None
        self._may_begin = True
        self._has_warned = False
        self._on_resume: Callable[[], None] | None = None

    # ---- iterating

    def __iter__(self) -> Iterator[int]:
        # chain yields the indices without running any Python code for each of them.
        return itertools.chain.from_iterable(self._blocks())

    def _blocks(self) -> Iterator[Iterator[int]]:
        """Yields this rank's indices, block by block. Nothing happens before the first one is requested."""
        iteration = self._begin()
        order = Permutation(self._length, self.seed, self.epoch) if self.shuffle else None
        left = self._length - iteration.start
        size = _FIRST_BLOCK
        done = 0
        while done < iteration.count:
            size = min(size, iteration.count - done)
            first = self.rank + done * self.num_replicas
            positions = np.arange(first, first + size * self.num_replicas, self.num_replicas, dtype=np.int64)
            if first + size * self.num_replicas > left:
                positions %= left  # padding: the first of the remaining samples again
            positions += iteration.start
            done += size
            yield iteration.start_block((positions if order is None else order(positions)).tolist())
            size = min(2 * size, _LARGEST_BLOCK)

    def _begin(self) -> _Iteration:
        if (now := len(self.dataset)) != self._length:
            raise UsageError(f"the dataset had {self._length} samples and has {now} now; make a new ShardSampler.")
        if not self._may_begin:
            self._start = 0
            if self.shuffle:
                self._take_next_epoch()
        self._may_begin = False
        if (call := self._on_resume) is not None:
            self._on_resume = None
            call()
        self._iteration = _Iteration(self._start, self._share(self._start))
        return self._iteration

    def _take_next_epoch(self) -> None:
        self.epoch += 1
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"set_epoch was not called since epoch {self.epoch - 1} began, so ShardSampler continues with epoch "
                f"{self.epoch} by itself; call set_epoch(epoch), or iterate over px.track(loader, epoch=epoch).",
                stacklevel=2,
            )

    def set_epoch(self, epoch: int) -> None:
        """Selects the order of another epoch, from its beginning.

        The epoch that `load_state_dict` has loaded resumes where it was, unless it has been run to its end.
        """
        epoch = whole_number("epoch", epoch)
        if epoch != self.epoch or (self._iteration is not None and self._iteration.is_over):
            self.epoch = epoch
            self._start = 0
            self._iteration = None
            self._on_resume = None
        self._may_begin = True

    # ---- how many

    def __len__(self) -> int:
        """Returns the number of indices of the current iteration on this rank, or else of the next one."""
        return self._share(self._start)

    @property
    def num_samples(self) -> int:
        return len(self)

    @property
    def total_size(self) -> int:
        """The number of indices on all ranks, with repeated samples and without those that are left out."""
        left = self._length - self._start
        return left if self.uneven == "exact" else self._share(self._start) * self.num_replicas

    def _share(self, start: int) -> int:
        left = self._length - start
        if self.uneven == "drop":
            return left // self.num_replicas
        if self.uneven == "pad":
            return -(-left // self.num_replicas)
        return len(range(self.rank, left, self.num_replicas))

    # ---- saving and resuming

    def received(self, count: int) -> None:
        """Reports that the training loop has received ``count`` more samples on this rank.

        From the first call in an iteration on, only such samples count as consumed.
        """
        if self._iteration is None:
            raise UsageError(f"received({count}) was called, but no iteration is under way; iterate first.")
        count = whole_number("count", count, 0)
        self._iteration.received = (self._iteration.received or 0) + count

    def state_dict(self) -> dict[str, int]:
        """Returns plain numbers: ``consumed`` is how many samples of this epoch all ranks together have received.

        They are the same on all ranks after the same number of samples on each. With ``uneven="exact"`` some ranks have
        one sample less, so save the state of rank 0, which has the most.
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self._consumed(),
            "length": self._length,
            "version": _VERSION,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes the next iteration yield the rest of the epoch in ``state``. All ranks need the same state.

        The seed becomes that of the state. The number of ranks may be another one.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"the sampler's state is {shown(state)}; give what state_dict() returned.")
        missing = {"seed", "epoch", "consumed", "length", "version"} - state.keys()
        if missing:
            raise UsageError(
                f"the sampler's state lacks {', '.join(sorted(missing))}; give what state_dict() returned."
            )
        if state["version"] != _VERSION:
            raise UsageError(
                f"the sampler's state has version {state['version']}, but this phalanx knows version {_VERSION}; "
                "use the phalanx that wrote it, or start the epoch again."
            )
        if state["length"] != self._length:
            raise UsageError(
                f"the sampler's state is of a dataset of {state['length']} samples, but this one has {self._length}; "
                "give the same dataset, or start the epoch again."
            )
        seed, epoch, consumed = (whole_number(f"state[{key!r}]", state[key]) for key in ("seed", "epoch", "consumed"))
        if not 0 <= consumed <= self._length:
            raise UsageError(
                f"the sampler's state says that {consumed} of {self._length} samples are consumed; "
                "give what state_dict() returned."
            )
        self._on_resume = None
        self.seed, self.epoch, self._start = seed, epoch, consumed
        self._iteration = None
        self._may_begin = True

    def on_resume(self, call: Callable[[], None]) -> None:
        """Registers a function to call when an iteration resumes the loaded state, before its first index.

        That is after a DataLoader has begun and before it fetches anything. It is not called if another epoch is set
        before that.
        """
        self._on_resume = call

    def _consumed(self) -> int:
        if self._iteration is None:
            return self._start
        if self._iteration.is_over:  # the samples that "drop" leaves out are done with, too
            return self._length
        return min(self._iteration.start + self._iteration.consumed * self.num_replicas, self._length)


class _Iteration:
    """One iteration on this rank: its first position, and how many indices it has yielded."""

    def __init__(self, start: int, count: int) -> None:
        self.start = start
        self.count = count
        """The number of indices on this rank."""
        self.received: int | None = None
        self._computed = 0
        self._block: Iterator[int] = iter(())

    def start_block(self, block: list[int]) -> Iterator[int]:
        self._computed += len(block)
        self._block = iter(block)
        return self._block

    @property
    def consumed(self) -> int:
        # The iterator of a list knows how much is left of it, so the indices need not be counted one by one.
        return self._computed - operator.length_hint(self._block) if self.received is None else self.received

    @property
    def is_over(self) -> bool:
        return self.consumed >= self.count


def _check_uneven(uneven: Uneven | None, drop_last: bool) -> Uneven:
    if uneven not in (None, "pad", "drop", "exact"):
        raise UsageError(f"uneven is {uneven!r}; give 'pad', 'drop' or 'exact'.")
    if drop_last and uneven not in (None, "drop"):
        raise UsageError(f"drop_last=True and uneven={uneven!r} contradict each other; leave one of them out.")
    return uneven or ("drop" if drop_last else "pad")


def _length(dataset: Sized) -> int:
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"the dataset is {shown(dataset)}, which has no length; split it with px.shard(dataset) instead."
        )
    if (length := len(dataset)) > LONGEST:
        raise UsageError(f"the dataset has {length} samples; ShardSampler counts up to 2**62.")
    return length
