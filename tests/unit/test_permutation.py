"""The order of samples: a permutation at every length, the same for ever, and as random as torch.randperm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phalanx.data import permutation
from phalanx.data.permutation import LONGEST, Permutation, sides

Order = NDArray[np.int64]


def whole(length: int, *key: int) -> Order:
    return Permutation(length, *key)(np.arange(length))


# ---- it is a permutation


def test_no_sample_is_missing() -> None:
    lengths = [*range(300), *range(300, 4080, 35), *range(4080, 5001)]  # the way of computing changes at 4096
    for length in [*lengths, 65_535, 65_536, 65_537, 99_991, 100_000, 2**17, 300_007]:
        assert np.array_equal(np.sort(whole(length, 1, length)), np.arange(length)), length


def test_the_sides_cover_the_length_and_little_more() -> None:
    lengths = [*range(4097, 20_000, 7), 10**6, 10**8, 2**32 - 1, 2**32, 2**32 + 1, 10**12, LONGEST - 1, LONGEST]
    for length in lengths:
        most = 2**16 if length <= 2**32 else 2**32
        rows, columns = sides(length, most)
        assert rows * columns >= length
        assert max(rows, columns) <= most
        assert rows * columns - length <= max(rows, columns)


# ---- the arithmetic, once more in Python's own integers, which cannot overflow


def hashed(word: int, key: int, modulus: int, bits: int) -> int:
    first, second, shift = permutation._MULTIPLIERS[bits]
    mask = 2**bits - 1
    mixed = (word ^ key) * first & mask
    mixed = (mixed ^ mixed >> shift) * second & mask
    return (mixed >> bits // 2) * modulus >> bits // 2


class Reference:
    """The network as the module's docstring describes it, forwards and backwards."""

    def __init__(self, length: int, *key: int) -> None:
        self.length = length
        self.bits = 32 if length <= 2**32 else 64
        self.rows, self.columns = sides(length, 2 ** (self.bits // 2))
        seeds = permutation._Seeds(*key)
        self.keys = [seeds.draw() >> 64 - self.bits for _ in range(6)]

    def forwards(self, position: int) -> int:
        row, column = divmod(position, self.columns)
        for number, key in enumerate(self.keys):
            if number % 2 == 0:
                row = (row + hashed(column, key, self.rows, self.bits)) % self.rows
            else:
                column = (column + hashed(row, key, self.columns, self.bits)) % self.columns
        index = row * self.columns + column
        return index if index < self.length else self.forwards(index)

    def backwards(self, index: int) -> int:
        row, column = divmod(index, self.columns)
        for number, key in reversed(list(enumerate(self.keys))):
            if number % 2 == 0:
                row = (row - hashed(column, key, self.rows, self.bits)) % self.rows
            else:
                column = (column - hashed(row, key, self.columns, self.bits)) % self.columns
        position = row * self.columns + column
        return position if position < self.length else self.backwards(position)


LENGTHS = [4097, 5000, 10**6, 2**32 - 1, 2**32, 2**32 + 1, 10**12, 2**53 + 1, LONGEST - 1, LONGEST]


@given(
    length=st.one_of(st.sampled_from(LENGTHS), st.integers(4097, LONGEST)),
    key=st.integers(-(2**130), 2**130),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_it_is_the_network_that_the_docstring_describes(length: int, key: int, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    positions = [*drawn, 0, length - 1]
    indices = Permutation(length, key)(np.array(positions, dtype=np.int64))
    reference = Reference(length, key)
    assert indices.dtype == np.int64
    assert indices.tolist() == [reference.forwards(position) for position in positions]
    assert [reference.backwards(index) for index in indices.tolist()] == positions


def test_long_orders_stay_in_range_without_repeats() -> None:
    for length, half in itertools.product(LENGTHS[2:], (0, 1, 2)):
        start = (length - 100_000) * half // 2
        indices = Permutation(length, 5)(np.arange(start, start + 100_000))
        assert indices.min() >= 0
        assert indices.max() < length
        assert len(np.unique(indices)) == 100_000


@pytest.mark.parametrize("length", [1, 1000, 10**6, 10**12])
def test_any_part_in_any_piece_is_the_same(length: int) -> None:
    order = Permutation(length, 9)
    positions = np.arange(length - min(length, 3000), length)
    expected = order(positions)
    assert np.array_equal(np.concatenate([order(piece) for piece in np.array_split(positions, 7)]), expected)
    assert np.array_equal(order(positions[::-1]), expected[::-1])
    assert np.array_equal(Permutation(length, 9)(positions.astype(np.uint64)), expected)


def test_the_numbers_never_change() -> None:
    """A saved state stands for this order. If these change, so must the version of the sampler's state."""
    assert whole(10, 0, 0).tolist() == GOLDEN_10
    for length, golden in GOLDEN.items():
        assert Permutation(length, 42, 7)(np.array([0, 1, length // 2, length - 1])).tolist() == golden


GOLDEN_10 = [5, 4, 6, 1, 2, 0, 3, 9, 7, 8]
GOLDEN = {
    4096: [1566, 573, 1013, 2762],
    4097: [1317, 1095, 3401, 1654],
    10**6: [256353, 828930, 805939, 508441],
    2**32: [1211295857, 644527452, 1495477196, 2950075050],
    2**32 + 1: [3271043976, 2846390103, 3949494707, 2090288983],
    10**12: [907210459425, 72110808749, 340004607506, 677336379119],
    2**62: [749541585488917045, 4443687738275285617, 3402875401235174892, 3285555251883702833],
}


def test_every_key_is_another_order() -> None:
    keys = [(), (0,), (1,), (-1,), (0, 0), (0, 1), (1, 0), (2**64,), (2**64 + 1,), (1, 2**64), (2**200,), (-(2**200),)]
    for length in (500, 5000):
        orders = {whole(length, *key).tobytes() for key in keys}
        assert len(orders) == len(keys)


# ---- it is random enough. Each test computes figures that are chi-square or normally distributed for a random order,
# and is applied to torch.randperm as well. The seeds are fixed, so a test passes always or never. There are about a
# thousand figures, and a random order exceeds 4.5 standard deviations once in 150,000, so all should pass. The last
# test shows that networks of too few rounds do not.

DEVIATIONS = 4.5
Source = Callable[[int, int, int], Order]


def ours(length: int, seed: int, epoch: int) -> Order:
    return whole(length, seed, epoch)


def torchs(length: int, seed: int, epoch: int) -> Order:
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(length, generator=generator).numpy()


both = pytest.mark.parametrize("source", [ours, torchs])
SIZES = [100, 4096, 4099, 5000, 65_521]


def exceeds(chi_square: float, freedom: int) -> bool:
    """By Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal."""
    spread = 2 / (9 * freedom)
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return abs(deviation) > DEVIATIONS


def check_spread(found: Order, bins: int, values: int, freedom: int | None = None) -> None:
    """All numbers below ``values`` are equally likely; they are counted in ``bins`` parts, as equal as can be."""
    counts = np.bincount(found * bins // values, minlength=bins)
    expected = np.bincount(np.arange(values) * bins // values, minlength=bins) * (found.size / values)
    assert expected.min() >= 5
    assert not exceeds(float(((counts - expected) ** 2 / expected).sum()), freedom or bins - 1)


def cells(order: Order, bins: int) -> Order:
    """Numbers as the part of the range that they are in: of ``bins`` parts."""
    return order * bins // len(order)


def epochs(source: Source, length: int, count: int, seed: int = 0) -> Iterator[Order]:
    return (source(length, seed, epoch) for epoch in range(count))


@both
@pytest.mark.parametrize("length", SIZES)
def test_every_sample_comes_everywhere(source: Source, length: int) -> None:
    """Where in the epoch (ten parts) the parts of the dataset come, over many epochs: counts of a 10 × 10 table."""
    table = np.zeros((10, 10), np.int64)
    part = 10 * np.arange(length) // length
    for order in epochs(source, length, 60):
        np.add.at(table, (part, cells(order, 10)), 1)
    # The margins are fixed in a permutation, which leaves (10 - 1)² degrees of freedom; and drawing without
    # replacement has chi-square larger by n / (n - 1), which is nothing here.
    expected = np.outer(np.bincount(part), np.bincount(cells(np.arange(length), 10))) / length * 60
    assert not exceeds(float(((table - expected) ** 2 / expected).sum()), 81)


@both
@pytest.mark.parametrize("length", [97, 4099])
def test_single_positions(source: Source, length: int) -> None:
    """Which sample comes first, in the middle and last, over 1000 seeds."""
    orders = np.array([source(length, seed, 3)[[0, length // 2, length - 1]] for seed in range(1000)])
    for place in range(3):
        check_spread(orders[:, place], 40, length)


@both
@pytest.mark.parametrize("length", SIZES[1:])
def test_neighbours_are_not_related(source: Source, length: int) -> None:
    """Serial correlation is near normal, with mean -1/n and deviation 1/√n; and pairs fill a 16 × 16 table."""
    for order, lag in itertools.product(epochs(source, length, 5, seed=11), (1, 2, 8, 64, round(math.sqrt(length)))):
        centred = order - (length - 1) / 2
        correlation = float((centred * np.roll(centred, -lag)).sum() / (centred**2).sum())
        assert abs(correlation + 1 / length) * math.sqrt(length) < DEVIATIONS
        pairs = 16 * cells(order, 16) + np.roll(cells(order, 16), -lag)
        check_spread(pairs, 256, 256, freedom=225)


@both
@pytest.mark.parametrize("length", SIZES[1:])
def test_differences_of_neighbours(source: Source, length: int) -> None:
    """A network with too few rounds keeps differences: neighbours with the same row stay in one row, or column."""
    for order in epochs(source, length, 5, seed=12):
        differences = (order - np.roll(order, 1)) % length
        check_spread(differences, 64, length)
        columns = round(math.sqrt(length))
        for width in (columns - 1, columns, columns + 1):
            check_spread(differences % width, 16, width)


# torch reads 32 bits of a seed, so that some of these steps would be none there.
STEPS = [(ours, step) for step in ((0, 1), (1, 0), (1, -1), (0, 2**32), (2**64, 0))]
STEPS += [(torchs, step) for step in ((0, 1), (1, 0), (1, -1))]


@pytest.mark.parametrize(("source", "step"), STEPS)
def test_epochs_and_seeds_are_not_related(source: Source, step: tuple[int, int]) -> None:
    """Two orders beside each other: correlation, a 16 × 16 table, and how many samples come at the same position."""
    seed, epoch = step
    for length in SIZES[1:]:
        one, other = source(length, 5, 6), source(length, 5 + seed, 6 + epoch)
        centre = (length - 1) / 2
        correlation = float(((one - centre) * (other - centre)).sum() / ((one - centre) ** 2).sum())
        assert abs(correlation) * math.sqrt(length) < DEVIATIONS
        check_spread(16 * cells(one, 16) + cells(other, 16), 256, 256, freedom=225)
        assert (one == other).sum() <= 8  # Poisson with mean 1: more than 8 once in a million


@both
@pytest.mark.parametrize("length", SIZES[:-1])
def test_fixed_points_and_cycles(source: Source, length: int) -> None:
    """Of a random permutation one sample stays in its place on the average, and it falls into about ln n cycles."""
    points, cycles = [], []
    for order in epochs(source, length, 30, seed=13):
        points.append(int((order == np.arange(length)).sum()))
        cycles.append(count_cycles(order))
    assert abs(sum(points) - 30) < DEVIATIONS * math.sqrt(30)
    mean = math.log(length) + 0.5772
    deviation = math.sqrt(30 * (mean - math.pi**2 / 6))
    assert abs(sum(cycles) - 30 * mean) < DEVIATIONS * deviation


def count_cycles(order: Order) -> int:
    following = order.tolist()
    count = 0
    for start in range(len(following)):
        if following[start] >= 0:
            count += 1
            at = start
            while at >= 0:
                following[at], at = -1, following[at]
    return count


@pytest.mark.parametrize("length", [2**32 - 5, 2**32 + 15, 10**12])
def test_long_orders_are_spread_as_well(length: int) -> None:
    """Beginnings of orders that nobody could write down, beside numbers drawn at random."""
    count = 200_000
    for first in (0, length // 3):
        found = Permutation(length, 21)(np.arange(first, first + count))
        cell = found // -(-length // 16)
        check_spread(cell, 16, 16)
        check_spread(16 * cell[:-1] + cell[1:], 256, 256)
        check_spread(found % 64, 64, 64)


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_tests_see_weaker_networks(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_ROUNDS", rounds)
    for length in SIZES[2:]:
        with pytest.raises(AssertionError):
            test_differences_of_neighbours(ours, length)
