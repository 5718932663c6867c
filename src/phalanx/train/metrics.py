"""Metrics that are exact over uneven shards: local sums and counts, and one exchange for all metrics of a report.

Nothing is exchanged while they are updated, and no value is fetched from a GPU before it is asked for.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from phalanx import world as worlds
from phalanx.argparser import shown
from phalanx.errors import UsageError

Number = float | int | Tensor


class Metric:
    """What `compute_metrics` can put together: a few numbers of this rank, and how those of all ranks become one."""

    def state(self) -> list[Number]:
        """The numbers of this rank; the same many on every rank."""
        raise NotImplementedError

    def combine(self, states: Tensor) -> float:
        """The result, from the states of all ranks (ranks × numbers, float64, in the order of the ranks)."""
        raise NotImplementedError

    def reset(self) -> None:
        """As new, for the next epoch."""
        raise NotImplementedError

    def compute(self) -> float:
        """The value over all ranks. Every rank must call it; `compute_metrics` takes several at once."""
        return compute_metrics(value=self)["value"]


class Mean(Metric):
    """The mean of everything that was given, on all ranks together, however unevenly they were given it.

    loss_of_all = px.Mean()
    loss_of_all.update(loss, len(x))    # the mean of a batch, and of how many
    correct.update(guess == y)          # or a tensor: the mean of its elements
    loss_of_all.compute()               # on every rank
    """

    def __init__(self) -> None:
        self.reset()

    def update(self, value: Number, count: float | None = None) -> None:
        """Adds the mean of ``count`` values, or, without a count, every element of ``value``."""
        value = _checked(value, "Mean")
        if not isinstance(count, Real | Tensor | None):
            raise UsageError(f"count is {shown(count)}; give how many values the mean is of.")
        if isinstance(value, Tensor):
            value = value.detach().double()
            if count is None:
                self._sum, self._count = self._sum + value.sum(), self._count + value.numel()
                return
            if value.numel() != 1:
                raise UsageError(
                    f"Mean.update got {value.numel()} values with count={count:g}; "
                    "a count belongs to one mean, and without it every value counts."
                )
            value = value.reshape(())
        weight = 1 if count is None else count
        self._sum, self._count = self._sum + value * weight, self._count + weight

    def state(self) -> list[Number]:
        return [self._sum, self._count]

    def combine(self, states: Tensor) -> float:
        total, count = states.sum(0).tolist()
        return total / count if count else float("nan")

    def reset(self) -> None:
        self._sum: Number = 0.0
        self._count: float = 0


class Sum(Metric):
    """The sum of everything that was given on all ranks."""

    def __init__(self) -> None:
        self.reset()

    def update(self, value: Number) -> None:
        value = _checked(value, "Sum")
        self._sum = self._sum + (value.detach().double().sum() if isinstance(value, Tensor) else value)

    def state(self) -> list[Number]:
        return [self._sum]

    def combine(self, states: Tensor) -> float:
        return states.sum().item()

    def reset(self) -> None:
        self._sum: Number = 0.0


def _checked(value: Any, metric: str) -> Number:
    """A number, or what torch makes a tensor of."""
    try:
        if isinstance(value, Real):  # numpy's numbers are, too
            return float(value)
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"{metric}.update got {shown(value)}; give a number or a tensor.") from None


class Max(Metric):
    """The largest of everything that was given on all ranks; NaN when nothing was."""

    def __init__(self) -> None:
        self.reset()

    def update(self, value: Number) -> None:
        given = torch.as_tensor(_checked(value, type(self).__name__)).detach().double()
        if given.numel():
            largest = given.max()
            self._extreme = largest if self._extreme is None else torch.maximum(self._extreme, largest)

    def state(self) -> list[Number]:
        return [float("nan") if self._extreme is None else self._extreme]

    def combine(self, states: Tensor) -> float:
        given = states[~states.isnan()]
        return given.max().item() if given.numel() else float("nan")

    def reset(self) -> None:
        self._extreme: Tensor | None = None


class Min(Max):
    """The smallest of everything that was given on all ranks; NaN when nothing was."""

    def update(self, value: Number) -> None:
        super().update(-torch.as_tensor(_checked(value, "Min")))

    def combine(self, states: Tensor) -> float:
        return -super().combine(states)


def compute_metrics(**metrics: Metric) -> dict[str, float]:
    """The values of several metrics over all ranks, with one exchange. Every rank must call it with the same ones."""
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise UsageError(
                f"{name}={metric!r} is not a metric of phalanx; give px.Mean(), px.Sum(), px.Max(), px.Min()."
            )
    if not metrics:
        return {}
    states = {name: metric.state() for name, metric in metrics.items()}
    everyone = _from_all_ranks([number for state in states.values() for number in state])
    values, start = {}, 0
    for name, metric in metrics.items():
        end = start + len(states[name])
        values[name] = metric.combine(everyone[:, start:end])
        start = end
    return values


def _from_all_ranks(numbers: list[Number]) -> Tensor:
    """A row for each rank. They are gathered, not summed, so the result has the same bits on every rank."""
    world = worlds.current()
    own = torch.stack([torch.as_tensor(number, dtype=torch.float64).cpu() for number in numbers])
    if world.size == 1:
        return own.unsqueeze(0)
    import torch.distributed as dist

    sent: Any = own.to(world.device) if world.backend == "nccl" else own
    rows = [torch.empty_like(sent) for _ in range(world.size)]
    dist.all_gather(rows, sent)
    return torch.stack(rows).cpu()
