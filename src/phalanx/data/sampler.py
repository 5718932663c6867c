"""`ShardSampler`: DistributedSampler's interface over an order that is computed, not stored."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Literal

import numpy as np
from torch.utils.data import Sampler

from phalanx.argparser import shown, whole_number
from phalanx.data.permutation import LONGEST, Permutation
from phalanx.data.position import find_position
from phalanx.errors import UsageError

Uneven = Literal["pad", "drop", "exact"]

_VERSION = 1
"""Of the state, and of the order: what the same state stood for yesterday it has to stand for tomorrow."""

_FIRST_BLOCK = 64  # the first index comes at once …
_LARGEST_BLOCK = 8192  # … and a long epoch is computed in pieces that the processor's cache holds


class ShardSampler(Sampler[int]):
    """Gives every rank its part of a dataset, in an order that depends on the seed and the epoch alone.

    It takes DistributedSampler's place: same arguments, same methods, same attributes. Beyond that:

    - The first index comes at once and no list of indices is held, whatever the length, up to 2**62.
    - ``uneven="exact"`` gives every sample to exactly one rank, as evaluation needs it.
    - A run that was stopped within an epoch goes on with `load_state_dict`, on any number of ranks.

    Position p of the order belongs to rank p mod ``num_replicas``. When the samples do not come out even, ``uneven``
    says what is done: "pad" repeats the first ones until they do, "drop" leaves the last ones out, "exact" lets some
    ranks have one sample less than others. A dataset that is smaller than the world works too: "pad" repeats it as
    often as needed, "drop" gives nobody anything, "exact" leaves some ranks with nothing. An empty one has nothing to
    repeat, so all ranks get nothing.

    What counts as consumed is what this sampler was asked for, until `received` has been called: a DataLoader with
    workers asks ahead of the training loop. ``px.track`` calls `received` with every batch that it hands out.

    If an iteration begins and `set_epoch` was not called since the last one began, the next epoch is taken, with a
    warning (or, with ``shuffle=False``, the same again). That is only right if it happens on all ranks.

    Args:
        dataset: anything with a length.
        num_replicas, rank: given, or those of the process group; a world of one without a group.
        shuffle: False gives the dataset's own order.
        seed: any integer, the same on all ranks.
        drop_last: DistributedSampler's way to say ``uneven="drop"``.
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
        self.uneven: Uneven = _settle(uneven, drop_last)
        self.drop_last = self.uneven == "drop"
        self._length = _length(dataset)
        self._start = 0
        """Where in the order of this epoch iterations begin: what had been consumed when the state was loaded."""
        self._walk: _Walk | None = None
        self._may_begin = True
        self._has_warned = False
        self._on_going_on: Callable[[], None] | None = None

    # ---- iterating

    def __iter__(self) -> Iterator[int]:
        # chain hands the indices out without running any Python code for each of them.
        return itertools.chain.from_iterable(self._blocks())

    def _blocks(self) -> Iterator[Iterator[int]]:
        """This rank's indices, piece by piece. Nothing happens before the first one is asked for."""
        walk = self._begin()
        order = Permutation(self._length, self.seed, self.epoch) if self.shuffle else None
        left = self._length - walk.start
        size = _FIRST_BLOCK
        done = 0
        while done < walk.count:
            size = min(size, walk.count - done)
            first = self.rank + done * self.num_replicas
            places = np.arange(first, first + size * self.num_replicas, self.num_replicas, dtype=np.int64)
            if first + size * self.num_replicas > left:
                places %= left  # padding: from the beginning of what was left
            places += walk.start
            done += size
            yield walk.hand_out((places if order is None else order(places)).tolist())
            size = min(2 * size, _LARGEST_BLOCK)

    def _begin(self) -> _Walk:
        if (now := len(self.dataset)) != self._length:
            raise UsageError(f"the dataset had {self._length} samples and has {now} now; make a new ShardSampler.")
        if not self._may_begin:
            self._start = 0
            if self.shuffle:
                self._take_next_epoch()
        self._may_begin = False
        if (call := self._on_going_on) is not None:
            self._on_going_on = None
            call()
        self._walk = _Walk(self._start, self._share(self._start))
        return self._walk

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
        """Another epoch is another order, from its beginning.

        The epoch that `load_state_dict` has brought goes on where it was, until it has been run to its end.
        """
        epoch = whole_number("epoch", epoch)
        if epoch != self.epoch or (self._walk is not None and self._walk.is_over):
            self.epoch = epoch
            self._start = 0
            self._walk = None
            self._on_going_on = None
        self._may_begin = True

    # ---- how many

    def __len__(self) -> int:
        """How many indices the iteration under way gives on this rank in all, or else the next one."""
        return self._share(self._start)

    @property
    def num_samples(self) -> int:
        """The same as len()."""
        return len(self)

    @property
    def total_size(self) -> int:
        """The same over all ranks, with what is repeated and without what is left out."""
        left = self._length - self._start
        return left if self.uneven == "exact" else self._share(self._start) * self.num_replicas

    def _share(self, start: int) -> int:
        left = self._length - start
        if self.uneven == "drop":
            return left // self.num_replicas
        if self.uneven == "pad":
            return -(-left // self.num_replicas)
        return len(range(self.rank, left, self.num_replicas))

    # ---- stopping and going on

    def received(self, count: int) -> None:
        """The training loop has got ``count`` more samples on this rank.

        Once it was called within an iteration, what it was told counts as consumed there, and not what the sampler was
        asked for.
        """
        if self._walk is None:
            raise UsageError(f"received({count}) was called, but no iteration is under way; iterate first.")
        count = whole_number("count", count, 0)
        self._walk.received = (self._walk.received or 0) + count

    def state_dict(self) -> dict[str, int]:
        """Plain numbers: ``consumed`` is how many samples of this epoch all ranks together have got.

        They are the same on all ranks after the same number of samples on each. With ``uneven="exact"`` some ranks have
        one sample less, so save those of rank 0, which has the most.
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self._consumed(),
            "length": self._length,
            "version": _VERSION,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next iteration gives what the epoch in ``state`` has left, maybe nothing; all ranks need the same state.

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
        self._on_going_on = None
        self.seed, self.epoch, self._start = seed, epoch, consumed
        self._walk = None
        self._may_begin = True

    def when_it_goes_on(self, call: Callable[[], None]) -> None:
        """``call`` is called when an iteration takes up what `load_state_dict` has brought, before its first index.

        That is after a DataLoader has begun and before it fetches anything. It is not called if the epoch that was
        brought is left without an iteration.
        """
        self._on_going_on = call

    def _consumed(self) -> int:
        if self._walk is None:
            return self._start
        if self._walk.is_over:  # what "drop" leaves out is done with, too
            return self._length
        return min(self._walk.start + self._walk.gone * self.num_replicas, self._length)


class _Walk:
    """One iteration: where it began, and how far it has come."""

    def __init__(self, start: int, count: int) -> None:
        self.start = start
        self.count = count
        """How many indices it gives on this rank in all."""
        self.received: int | None = None
        self._computed = 0
        self._block: Iterator[int] = iter(())

    def hand_out(self, block: list[int]) -> Iterator[int]:
        self._computed += len(block)
        self._block = iter(block)
        return self._block

    @property
    def gone(self) -> int:
        """A list's iterator knows how much is left of it, so nobody has to count the indices one by one."""
        return self._computed - operator.length_hint(self._block) if self.received is None else self.received

    @property
    def is_over(self) -> bool:
        return self.gone >= self.count


def _settle(uneven: Uneven | None, drop_last: bool) -> Uneven:
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
