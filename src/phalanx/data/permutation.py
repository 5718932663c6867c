"""A shuffled order of range(length) that is never stored: any part of it is computed on demand.

How it works. Up to 4096 numbers are sorted by a hash of each. More are laid out in a rectangle, nearly a square and
hardly larger than the length. Six rounds shift the row of each number by a hash of its column, and its column by a hash
of its row, in turn. That is a Feistel network: each round can be undone, so no two numbers meet, whatever the hash is.
The few numbers that land outside of range(length) go through the network again until they are inside (cycle walking,
Black and Rogaway 2002), which keeps the order a permutation.

All of it is plain integer arithmetic, so the order is the same with any version of numpy and on any machine; a test
holds some of its numbers. A change of the order needs a new version of the sampler's state.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LONGEST = 2**62
"""Positions and indices are 64-bit numbers, with room for one addition."""

_SORTED_UP_TO = 4096
_ROUNDS = 6  # four suffice against a reader without the key (Luby and Rackoff 1988); two more cost little
_CANDIDATES = 64

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64 (Steele, Lea and Flood 2014)

_MULTIPLIERS = {
    32: (0x7FEB352D, 0x846CA68B, 15),  # Wellons' lowbias32, without its last half round
    64: (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 31),
}

Words = NDArray[np.integer]


class Permutation:
    """Maps positions to indices, both from 0 to ``length`` − 1; another key gives another order.

    It keeps scratch memory for the largest array so far, so only one thread may use it at a time.
    """

    def __init__(self, length: int, *key: int) -> None:
        """``key`` is any number of integers of any size."""
        assert 0 <= length <= LONGEST, length
        self.length = length
        seeds = _Seeds(*key)
        self._order = _Sorted(length, seeds) if length <= _SORTED_UP_TO else _Network(length, seeds)

    def __call__(self, positions: Words) -> NDArray[np.int64]:
        """Returns the indices at these positions, each of which has to be in range(length)."""
        return self._order(positions)


class _Seeds:
    """An endless sequence of 64-bit numbers, drawn from the key."""

    def __init__(self, *key: int) -> None:
        self._state = 0
        for part in key:
            # The size and the sign go in as well: (1, 2) must differ from (1 + 2 * 2**64,), and 1 from -1.
            limbs = [abs(part) >> shift & _MASK for shift in range(0, max(1, abs(part).bit_length()), 64)]
            for limb in (2 * len(limbs) + (part < 0), *limbs):
                self._state = _mix((self._state ^ limb) + _GOLDEN & _MASK)

    def draw(self) -> int:
        self._state = self._state + _GOLDEN & _MASK
        return _mix(self._state)


def _mix(word: int) -> int:
    for shift, factor in _MIX:
        word = (word ^ word >> shift) * factor & _MASK
    return word ^ word >> 31


class _Sorted:
    """The whole order, as a table."""

    def __init__(self, length: int, seeds: _Seeds) -> None:
        words = np.arange(1, length + 1, dtype=np.uint64)
        words *= np.uint64(_GOLDEN)
        words += np.uint64(seeds.draw())
        for shift, factor in _MIX:
            words ^= words >> np.uint64(shift)
            words *= np.uint64(factor)
        words ^= words >> np.uint64(31)
        self._table = np.argsort(words, kind="stable").astype(np.int64)

    def __call__(self, positions: Words) -> NDArray[np.int64]:
        return self._table[positions]


class _Network:
    """The Feistel network. Its words have 32 bits if they hold every number: processors do twice as many at once."""

    def __init__(self, length: int, seeds: _Seeds) -> None:
        self._bits = 32 if length <= 2**32 else 64
        self._type = np.dtype(f"uint{self._bits}").type
        rows, columns = sides(length, 2 ** (self._bits // 2))
        first, second, shift = _MULTIPLIERS[self._bits]
        self._first, self._second, self._shift = self._type(first), self._type(second), self._type(shift)
        self._half = self._type(self._bits // 2)
        self._rows, self._columns, self._length = self._type(rows), self._type(columns), length
        self._fits = rows * columns == length
        self._keys = [self._type(seeds.draw() >> 64 - self._bits) for _ in range(_ROUNDS)]
        self._scratch = np.empty((3, 0), self._type)

    def __call__(self, positions: Words) -> NDArray[np.int64]:
        words = positions.astype(self._type)
        self._shuffle(words)
        if not self._fits:
            outside = np.flatnonzero(words >= self._type(self._length))
            while outside.size:
                again = words[outside]
                self._shuffle(again)
                words[outside] = again
                outside = outside[again >= self._type(self._length)]
        return words.astype(np.int64)

    def _shuffle(self, words: Words) -> None:
        """Computes all rounds, in place."""
        if words.size > self._scratch.shape[1]:
            self._scratch = np.empty((3, words.size), self._type)
        row, column, spare = self._scratch[:, : words.size]
        np.floor_divide(words, self._columns, out=row)
        np.multiply(row, self._columns, out=column)
        np.subtract(words, column, out=column)
        # `words` is free until the end, and serves as the second spare array.
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                self._round(row, column, self._rows, key, spare, words)
            else:
                self._round(column, row, self._columns, key, spare, words)
        np.multiply(row, self._columns, out=words)
        np.add(words, column, out=words)

    def _round(self, moved: Words, by: Words, modulus: np.integer, key: np.integer, spare: Words, other: Words) -> None:
        """Computes moved = (moved + hash(by)) mod modulus; a multiplication brings the hash into range(modulus)."""
        np.bitwise_xor(by, key, out=spare)
        np.multiply(spare, self._first, out=spare)
        np.right_shift(spare, self._shift, out=other)
        np.bitwise_xor(spare, other, out=spare)
        np.multiply(spare, self._second, out=spare)
        np.right_shift(spare, self._half, out=spare)
        np.multiply(spare, modulus, out=spare)
        np.right_shift(spare, self._half, out=spare)
        np.add(moved, spare, out=moved)
        # Below the modulus the difference wraps around and becomes huge, so the smaller one is the right one.
        np.subtract(moved, modulus, out=spare)
        np.minimum(moved, spare, out=moved)


def sides(length: int, most: int) -> tuple[int, int]:
    """Returns the rows and columns of the rectangle; neither exceeds ``most``.

    It is the smallest of many that are nearly square: the smaller it is, the fewer numbers need another pass.
    """
    least = math.isqrt(length - 1) + 1  # the square root, rounded up
    found = [(-(-length // columns), columns) for columns in range(least, min(least + _CANDIDATES, most + 1))]
    return min(found, key=lambda side: side[0] * side[1])
