"""ShardSampler and shard: beside DistributedSampler, exact, stopped and continued, and under a DataLoader."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from phalanx import ShardSampler, shard
from phalanx.errors import UsageError

# Two workers may be more than the machine has cores; and Python 3.12 tells of every fork beside torch's threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

LENGTHS = [0, 1, 2, 5, 10, 100, 4096, 4097, 10_001]
WORLDS = [1, 2, 3, 8]


def ranks(length: int, world: int, **options: Any) -> list[ShardSampler]:
    return [ShardSampler(range(length), world, rank, **options) for rank in range(world)]


def dealt(samplers: Iterable[ShardSampler]) -> Counter[int]:
    """How often each sample came over all ranks."""
    return Counter(itertools.chain.from_iterable(samplers))


# ---- DistributedSampler's interface


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_it_is_like_torchs(world: int, drop_last: bool) -> None:
    # With nothing to give, torch's stops at an assertion of its own, or divides by zero. Ours is in the next test.
    lengths = [length for length in LENGTHS if length >= (world if drop_last else 1)]
    for length, rank in itertools.product(lengths, range(world)):
        data: Any = range(length)
        theirs = DistributedSampler(data, world, rank, False, 3, drop_last)
        mine = ShardSampler(data, world, rank, False, 3, drop_last)
        assert list(mine) == list(theirs)
        shuffled = ShardSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=3, drop_last=drop_last)
        assert len(list(shuffled)) == len(shuffled) == len(theirs)
        for name in ("dataset", "num_replicas", "rank", "epoch", "seed", "drop_last", "num_samples", "total_size"):
            assert getattr(mine, name) == getattr(theirs, name), name


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_what_is_uneven(world: int, shuffle: bool) -> None:
    for length in LENGTHS:
        check_uneven(length, world, shuffle)


def check_uneven(length: int, world: int, shuffle: bool) -> None:
    exact = ranks(length, world, shuffle=shuffle, uneven="exact")
    assert dealt(exact) == Counter(range(length))
    shares = [len(sampler) for sampler in exact]
    assert sum(shares) == length == exact[0].total_size
    assert max(shares) - min(shares) <= 1

    padded = ranks(length, world, shuffle=shuffle, uneven="pad")
    counts = dealt(padded)
    assert set(counts) == set(range(length))
    assert sum(counts.values()) == padded[0].total_size == -(-length // world) * world
    assert not counts or max(counts.values()) - min(counts.values()) <= 1

    dropped = ranks(length, world, shuffle=shuffle, uneven="drop")
    counts = dealt(dropped)
    assert sum(counts.values()) == dropped[0].total_size == length // world * world
    assert max(counts.values(), default=1) == 1


def test_the_order_does_not_depend_on_the_world() -> None:
    alone = list(ShardSampler(range(10_001), 1, 0, seed=4, uneven="exact"))
    for world in (2, 3, 7):
        parts = [list(sampler) for sampler in ranks(10_001, world, seed=4, uneven="exact")]
        together = [index for row in itertools.zip_longest(*parts) for index in row if index is not None]
        assert together == alone


def test_seeds_and_epochs_are_keys_of_their_own() -> None:
    """torch's adds them up: epoch 1 of seed 0 is epoch 0 of seed 1 there."""
    orders = set()
    for seed, epoch in itertools.product((0, 1, 2**70), (0, 1, 2)):
        sampler = ShardSampler(range(1000), 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 9


def test_no_list_is_held() -> None:
    sampler = ShardSampler(range(2**62), 3, 1)
    assert len(sampler) == (2**62 + 2) // 3
    indices = list(itertools.islice(sampler, 20_000))
    assert len(set(indices)) == 20_000
    assert max(indices) < 2**62
    assert sampler.state_dict()["consumed"] == 60_000


def test_without_a_group_it_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ShardSampler(range(10))
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    assert sorted(shard(range(10))) == list(range(10))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UsageError, match="has not joined yet"):  # every rank would see every sample
        ShardSampler(range(10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 2}, "num_replicas=2 was given without a rank; give rank=… as well."),
        ({"rank": 1}, "rank=1 was given without num_replicas; give num_replicas=… as well."),
        ({"num_replicas": 2, "rank": 2}, "rank is 2, but there are 2 ranks; give 0 to 1."),
        ({"num_replicas": 2, "rank": -1}, "rank is -1, but there are 2 ranks; give 0 to 1."),
        ({"num_replicas": 0, "rank": 0}, "num_replicas is 0; give 1 or more."),
        ({"uneven": "even"}, "uneven is 'even'; give 'pad', 'drop' or 'exact'."),
        (
            {"drop_last": True, "uneven": "exact"},
            "drop_last=True and uneven='exact' contradict each other; leave one of them out.",
        ),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ShardSampler(range(10), **options)
    assert str(caught.value) == message


def test_wrong_datasets() -> None:
    generator: Any = (number for number in range(3))
    with pytest.raises(
        UsageError, match=r"the dataset is <generator .*>, which has no length; split it with px\.shard"
    ):
        ShardSampler(generator)
    with pytest.raises(UsageError, match=r"counts up to 2\*\*62"):
        ShardSampler(range(2**62 + 1))
    data = [1, 2, 3]
    sampler = ShardSampler(data)
    data.append(4)
    with pytest.raises(UsageError, match="had 3 samples and has 4 now"):
        list(sampler)


# ---- epochs


def test_a_forgotten_epoch_is_drawn_and_told_once() -> None:
    sampler = ShardSampler(range(100), 1, 0)
    first = list(sampler)
    with pytest.warns(UserWarning, match=r"not called since epoch 0 began, so ShardSampler continues with epoch 1"):
        second = list(sampler)
    third = list(sampler)  # warnings are errors here
    assert sampler.epoch == 2
    for epoch, order in enumerate((first, second, third)):
        fresh = ShardSampler(range(100), 1, 0)
        fresh.set_epoch(epoch)
        assert list(fresh) == order


def test_an_iteration_that_was_broken_off_counts() -> None:
    sampler = ShardSampler(range(100), 1, 0)
    next(iter(sampler))
    with pytest.warns(UserWarning, match="continues with epoch 1"):
        assert len(list(sampler)) == 100


def test_iterators_that_nobody_asks_begin_nothing() -> None:
    sampler = ShardSampler(range(100), 1, 0)
    iter(sampler)
    iter(sampler)
    assert len(list(sampler)) == 100
    assert sampler.epoch == 0


def test_the_same_epoch_again_is_the_same_order() -> None:
    sampler = ShardSampler(range(100), 1, 0)
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(0)
    assert list(itertools.islice(sampler, 10)) == first[:10]
    sampler.set_epoch(0)  # after a look at the first batch
    assert list(sampler) == first


def test_without_shuffling_nothing_is_said() -> None:
    sampler = ShardSampler(range(10), 1, 0, shuffle=False)
    assert list(sampler) == list(sampler) == list(range(10))
    assert sampler.epoch == 0


# ---- state


def test_the_state_is_plain_numbers() -> None:
    sampler = ShardSampler(range(100), 4, 1, seed=7)
    sampler.set_epoch(3)
    assert sampler.state_dict() == {"seed": 7, "epoch": 3, "consumed": 0, "length": 100, "version": 1}
    indices = iter(sampler)
    for count in range(1, 26):
        next(indices)
        assert sampler.state_dict()["consumed"] == 4 * count
    sampler.set_epoch(4)
    assert sampler.state_dict()["consumed"] == 0
    assert all(type(value) is int for value in sampler.state_dict().values())


@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_after_the_end_nothing_is_left(uneven: Any) -> None:
    for sampler in ranks(10, 4, uneven=uneven):
        list(sampler)
        state = sampler.state_dict()
        assert state["consumed"] == 10
        again = ShardSampler(range(10), 1, 0, uneven=uneven)
        again.load_state_dict(state)
        assert len(again) == 0
        assert list(again) == []
        again.set_epoch(1)
        assert len(list(again)) == len(again) == 10


@given(
    length=st.integers(0, 300) | st.sampled_from([4096, 4097, 5003]),
    worlds=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    shuffle=st.booleans(),
    data=st.data(),
)
@settings(max_examples=120, deadline=None)
def test_going_on_with_other_worlds(length: int, worlds: list[int], shuffle: bool, data: st.DataObject) -> None:
    """Stopped again and again, each time continued on another number of ranks: every sample comes exactly once."""
    state = {"seed": 5, "epoch": 2, "consumed": 0, "length": length, "version": 1}
    seen: Counter[int] = Counter()
    for turn, world in enumerate(worlds):
        samplers = ranks(length, world, shuffle=shuffle, uneven="exact")
        for sampler in samplers:
            sampler.load_state_dict(state)
            sampler.set_epoch(2)
        steps = data.draw(st.integers(0, len(samplers[0]))) if turn < len(worlds) - 1 else None
        for sampler in samplers:
            seen.update(itertools.islice(sampler, steps))
        state = samplers[0].state_dict()
    assert seen == Counter(range(length))


@given(length=st.integers(1, 300), worlds=st.tuples(st.integers(1, 9), st.integers(1, 9)), data=st.data())
@settings(max_examples=100, deadline=None)
def test_padding_and_dropping_after_a_stop(length: int, worlds: tuple[int, int], data: st.DataObject) -> None:
    before, after = worlds
    steps = data.draw(st.integers(0, length // before))
    seen = Counter(index for each in ranks(length, before) for index in itertools.islice(each, steps))
    state = {"seed": 0, "epoch": 0, "consumed": steps * before, "length": length, "version": 1}
    left = set(range(length)) - set(seen)
    for uneven in ("pad", "drop"):
        samplers = ranks(length, after, uneven=uneven)
        for sampler in samplers:
            sampler.load_state_dict(state)
        counts = dealt(samplers)
        assert len({len(sampler) for sampler in samplers}) == 1
        assert sum(counts.values()) == samplers[0].total_size
        if uneven == "pad":
            assert set(counts) == left
            assert sum(counts.values()) - len(left) < after
        else:
            assert set(counts) <= left
            assert max(counts.values(), default=1) == 1
            assert len(left) - len(counts) < after


def test_what_was_loaded_goes_on_until_its_end() -> None:
    sampler = ShardSampler(range(100), 1, 0)
    order = list(sampler)
    sampler.load_state_dict({"seed": 0, "epoch": 0, "consumed": 60, "length": 100, "version": 1})
    assert len(sampler) == 40
    assert sampler.state_dict()["consumed"] == 60
    assert next(iter(sampler)) == order[60]
    sampler.set_epoch(0)  # after a look at the first batch
    assert list(sampler) == order[60:]
    sampler.set_epoch(0)
    assert len(sampler) == 100
    assert list(sampler) == order
    sampler.load_state_dict({"seed": 0, "epoch": 0, "consumed": 60, "length": 100, "version": 1})
    sampler.set_epoch(1)
    assert len(list(sampler)) == 100


def test_a_loaded_epoch_is_followed_by_a_whole_one() -> None:
    for shuffle in (True, False):
        sampler = ShardSampler(range(100), 1, 0, shuffle=shuffle)
        sampler.load_state_dict({"seed": 0, "epoch": 5, "consumed": 60, "length": 100, "version": 1})
        assert len(list(sampler)) == 40
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(list(sampler)) == 100
        assert sampler.epoch == (6 if shuffle else 5)


def test_states_that_do_not_fit() -> None:
    sampler = ShardSampler(range(10), 1, 0)
    good = sampler.state_dict()
    for change, message in [
        ({"version": 2}, "the sampler's state has version 2, but this phalanx knows version 1; "),
        ({"length": 11}, "the sampler's state is of a dataset of 11 samples, but this one has 10; "),
        ({"consumed": 11}, "the sampler's state says that 11 of 10 samples are consumed; "),
    ]:
        with pytest.raises(UsageError) as caught:
            sampler.load_state_dict({**good, **change})
        assert str(caught.value).startswith(message)
    with pytest.raises(UsageError, match="lacks epoch, seed;"):
        sampler.load_state_dict({name: good[name] for name in ("consumed", "length", "version")})
    with pytest.raises(UsageError, match="no iteration is under way"):
        sampler.received(1)


# ---- under a DataLoader


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def test_without_workers_the_sampler_is_asked_for_what_the_loop_gets() -> None:
    sampler = ShardSampler(Numbers(100), 2, 0)
    for number, _ in enumerate(DataLoader(Numbers(100), batch_size=8, sampler=sampler), 1):
        assert sampler.state_dict()["consumed"] == min(16 * number, 100)


def test_what_was_fetched_ahead_is_not_lost() -> None:
    """The workers are ahead of the loop when it stops; three ranks go on after two."""
    data = Numbers(100)
    seen: Counter[int] = Counter()
    states = []
    for rank in range(2):
        sampler = ShardSampler(data, 2, rank, uneven="exact")
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, prefetch_factor=3)
        for batch in itertools.islice(loader, 5):
            sampler.received(len(batch))
            seen.update(batch.tolist())
        assert sampler._iteration is not None
        sampler._iteration.received, told = None, sampler._iteration.received
        assert sampler.state_dict()["consumed"] > 40  # so much was asked for
        sampler._iteration.received = told
        states.append(sampler.state_dict())
        del loader
    assert states[0] == states[1]
    assert states[0]["consumed"] == 40
    for sampler in ranks(100, 3, uneven="exact"):
        sampler.load_state_dict(states[0])
        for batch in DataLoader(data, batch_size=4, sampler=sampler):
            seen.update(batch.tolist())
    assert seen == Counter(range(100))


def test_received_begins_anew_with_every_iteration() -> None:
    sampler = ShardSampler(range(100), 2, 0)
    list(itertools.islice(sampler, 10))
    sampler.received(6)
    assert sampler.state_dict()["consumed"] == 12
    sampler.received(4)
    assert sampler.state_dict()["consumed"] == 20
    sampler.set_epoch(1)
    list(itertools.islice(sampler, 3))
    assert sampler.state_dict()["consumed"] == 6


# ---- iterables


class Stream:
    """An iterable without a length that can be gone through more than once."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def test_shards_of_an_iterable() -> None:
    for length, world in itertools.product([0, 1, 2, 7, 100], [1, 2, 5]):
        parts = [list(shard(Stream(length), world, rank)) for rank in range(world)]
        assert parts == [list(range(rank, length, world)) for rank in range(world)]
        assert [len(shard(range(length), world, rank)) for rank in range(world)] == [len(part) for part in parts]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_shards_are_split_among_workers(workers: int) -> None:
    seen: list[int] = []
    for rank in range(2):
        part = shard(range(53), 2, rank)
        loader: DataLoader[int] = DataLoader(part, batch_size=4, num_workers=workers)
        assert len(loader) == -(-len(part) // 4)
        mine = torch.cat(list(loader)).tolist()
        assert len(mine) == len(part)
        seen += mine
    assert sorted(seen) == list(range(53))


def test_an_iterable_without_a_length_has_none() -> None:
    with pytest.raises(TypeError, match=r"object of type 'Stream' has no len\(\)"):
        len(shard(Stream(3), 1, 0))
    assert list(DataLoader(shard(Stream(3), 1, 0), batch_size=None)) == [0, 1, 2]


def test_shards_can_be_sent_to_spawned_workers() -> None:
    assert list(pickle.loads(pickle.dumps(shard(range(7), 3, 1)))) == [1, 4]


def test_generators_can_be_split_once() -> None:
    assert list(shard((number for number in range(7)), 3, 1)) == [1, 4]
