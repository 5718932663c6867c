"""What torch's SyncBatchNorm needs of a device: operations that torch has for GPUs alone. For the device "sim"."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.devices import sim


def _along(values: Tensor, like: Tensor) -> Tensor:
    """One value for each channel, which is dimension 1."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _channels(tensor: Tensor) -> list[int]:
    """All other dimensions."""
    return [0, *range(2, tensor.dim())]


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.mean(_channels(x)), (x.var(_channels(x), unbiased=False) + eps).rsqrt()


def _gather_stats(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """``mean``, ``invstd`` and ``counts`` have a row for each rank."""
    counts = counts.view(-1, 1)
    total = counts.sum()
    of_all = (mean * counts).sum(0) / total
    variance = ((invstd.pow(-2) - eps + mean.pow(2)) * counts).sum(0) / total - of_all.pow(2)
    running_mean.mul_(1 - momentum).add_(of_all * momentum)
    running_var.mul_(1 - momentum).add_(variance * (total / (total - 1)) * momentum)
    return of_all, (variance + eps).rsqrt()


def _normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return (x - _along(mean, x)) * _along(invstd * weight, x) + _along(bias, x)


def _reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum_dy = grad.sum(_channels(x))
    sum_dy_xmu = (grad * (x - _along(mean, x))).sum(_channels(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def _backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    about_mean = _along(sum_dy / total, x)
    about_variance = (x - _along(mean, x)) * _along(invstd.pow(2) * sum_dy_xmu / total, x)
    return (grad - about_mean - about_variance) * _along(invstd * weight, x)


def _index(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """With a mask, the host has to know how many elements there are: as on a GPU, it waits for the device."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            found.append(index)
        else:
            found += [each.to(sim.NAME) for each in index.cpu().nonzero(as_tuple=True)]
    return sim.run_later(torch.ops.aten.index.Tensor, tensor, found)


def register() -> None:
    for name, function in {
        "batch_norm_stats": _stats,
        "batch_norm_gather_stats_with_counts": _gather_stats,
        "batch_norm_elemt": _normalise,
        "batch_norm_backward_reduce": _reduce,
        "batch_norm_backward_elemt": _backward,
        "index.Tensor": _index,
    }.items():
        torch.library.impl(f"aten::{name}", "PrivateUse1")(function)
