"""Metrics that are exact over uneven shards: local sums and counts, and one exchange for all metrics of a report.

Updates exchange nothing, and no value is fetched from a GPU before it is computed.
"""

from __future__ import annotations

from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import world as worlds
from phalanx.argparser import shown
from phalanx.errors import UsageError

Number = float | int | Tensor


class Metric:
    """A few numbers of this rank, and how `compute_metrics` combines those of all ranks."""

    def __init__(self) -> None:
        self.reset()

    def state(self) -> list[Number]:
        """Returns the numbers of this rank; as many as on every other rank."""
        raise NotImplementedError

    def combine(self, states: Tensor) -> float:
        """Returns the result, from the states of all ranks (ranks × numbers, float64, in the order of the ranks)."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets all values, for the next epoch."""
        raise NotImplementedError

    def compute(self) -> float:
        """Returns the value over all ranks. Every rank must call it; `compute_metrics` takes several at once."""
        return compute_metrics(value=self)["value"]


class Mean(Metric):
    """The mean of all values, on all ranks together, however unevenly they are spread.

    loss_of_all = px.Mean()
    loss_of_all.update(loss, len(x))    # the mean of a batch, and of how many
    correct.update(guess == y)          # or a tensor: the mean of its elements
    loss_of_all.compute()               # on every rank
    """

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
    """The sum of all values on all ranks."""

    def update(self, value: Number) -> None:
        value = _checked(value, "Sum")
        self._sum = self._sum + (value.detach().double().sum() if isinstance(value, Tensor) else value)

    def state(self) -> list[Number]:
        return [self._sum]

    def combine(self, states: Tensor) -> float:
        return states.sum().item()

    def reset(self) -> None:
        self._sum: Number = 0.0


def _checked(value: object, metric: str) -> Number:
    """Returns a number, or a tensor of whatever torch makes one of."""
    try:
        if isinstance(value, Real):  # numpy's numbers are Real, too
            return float(value)
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"{metric}.update got {shown(value)}; give a number or a tensor.") from None


class Max(Metric):
    """The largest of all values on all ranks; NaN if there are none."""

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
    """The smallest of all values on all ranks; NaN if there are none."""

    def update(self, value: Number) -> None:
        super().update(-torch.as_tensor(_checked(value, "Min")))

    def combine(self, states: Tensor) -> float:
        return -super().combine(states)


def compute_metrics(**metrics: Metric) -> dict[str, float]:
    """Returns the values of several metrics over all ranks, with one exchange. Every rank must pass the same ones."""
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise UsageError(
                f"{name}={metric!r} is not a metric of phalanx; give px.Mean(), px.Sum(), px.Max(), px.Min()."
            )
    if not metrics:
        return {}
    states = {name: metric.state() for name, metric in metrics.items()}
    everyone = _gather([number for state in states.values() for number in state])
    values, start = {}, 0
    for name, metric in metrics.items():
        end = start + len(states[name])
        values[name] = metric.combine(everyone[:, start:end])
        start = end
    return values


def _gather(numbers: list[Number]) -> Tensor:
    """Returns a row for each rank. They are gathered, not summed, so that every rank gets the same bits."""
    world = worlds.current()
    own = torch.stack([torch.as_tensor(number, dtype=torch.float64).cpu() for number in numbers])
    if world.size == 1:
        return own.unsqueeze(0)
    # The backends of GPUs alone take no tensors of the CPU. The configuration is "cpu:gloo,cuda:nccl", for example.
    sent = own if "cpu:" in dist.get_backend_config() else own.to(world.device)
    rows = [torch.empty_like(sent) for _ in range(world.size)]
    dist.all_gather(rows, sent)
    return torch.stack(rows).cpu()
