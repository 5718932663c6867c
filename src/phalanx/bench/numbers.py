"""The numbers that the ranks send each other, such that every wrong result is seen.

Element i is a small whole number that differs from its neighbours, and rank r has it 2**r times: so a sum tells which
ranks went into it. All sums are whole numbers that float32 holds exactly, whatever the order of the additions.
"""

from __future__ import annotations

import numpy

MOST_RANKS = 16
_PERIOD = 251  # a prime: blocks and chunks begin elsewhere in the pattern


def pattern(calls: int, count: int) -> numpy.ndarray:
    """What is common to all ranks: one row for each call."""
    period = numpy.arange(1, _PERIOD + 1, dtype=numpy.float32)
    return numpy.resize(period, (calls, count))


def weight(rank: int) -> int:
    return 2**rank


def weight_of_all(ranks: int) -> int:
    return 2**ranks - 1


def check(found: numpy.ndarray, expected: numpy.ndarray, what: str) -> None:
    """Raises when they differ anywhere."""
    if not numpy.array_equal(found, expected):
        wrong = numpy.flatnonzero(found.ravel() != expected.ravel())
        first = int(wrong[0])
        raise ArithmeticError(
            f"{what} gave wrong numbers: {wrong.size} of {found.size}; "
            f"element {first} is {found.flat[first]:g}, not {expected.flat[first]:g}"
        )
