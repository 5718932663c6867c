"""Many figures as one: a median, and how far they spread around it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """``low`` and ``high`` are the extremes or the quartiles, as it was made."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Summary | None:
        """With the extremes: for a handful of figures."""
        return Summary(statistics.median(values), min(values), max(values)) if values else None

    @staticmethod
    def quartiles(values: Sequence[float]) -> Summary | None:
        """With the quartiles: for many figures, of which a few were taken while the machine did something else."""
        if len(values) < 2:
            return Summary.of(values)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Summary(median, low, high)

    def show(self, unit: float = 1.0, digits: int = 2) -> str:
        low, high = (f"{value / unit:.{digits}f}" for value in (self.low, self.high))
        return f"{self.median / unit:.{digits}f} ({low}–{high})"
