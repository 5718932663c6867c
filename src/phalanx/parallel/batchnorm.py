"""Batch norm over the batches of all ranks.

torch's SyncBatchNorm works on GPUs only; this one works on CPUs. Both give the results of BatchNorm in one process with
all samples, running statistics included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def synchronise(model: nn.Module, device_type: str, group: dist.ProcessGroup | None) -> nn.Module:
    """Replaces the BatchNorm layers of a model; parameters and buffers stay the same."""
    if device_type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    if isinstance(model, BatchNorm):
        return CpuSyncBatchNorm.like(model, group)
    replaced: dict[nn.Module, CpuSyncBatchNorm] = {}  # a layer with two names stays one
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, BatchNorm) and not isinstance(layer, CpuSyncBatchNorm):
            parent, _, name = path.rpartition(".")
            replaced[layer] = replaced.get(layer) or CpuSyncBatchNorm.like(layer, group)
            setattr(model.get_submodule(parent), name, replaced[layer])
    return model


class CpuSyncBatchNorm(nn.BatchNorm1d):
    """BatchNorm1d, 2d or 3d whose statistics, while it trains, are those of all ranks together."""

    process_group: dist.ProcessGroup | None

    @staticmethod
    def like(layer: BatchNorm, group: dist.ProcessGroup | None) -> CpuSyncBatchNorm:
        new = CpuSyncBatchNorm(
            layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta"
        )
        for name in _STATE:
            setattr(new, name, getattr(layer, name))
        new.process_group = group
        new.train(layer.training)
        return new

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        alone = not dist.is_initialized() or dist.get_world_size(self.process_group) == 1
        if not self.training or alone:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps, self.process_group)
        if self.track_running_stats:
            self._remember(mean, variance * (count / (count - 1)))
        return output

    def _remember(self, mean: Tensor, unbiased: Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalise(torch.autograd.Function):
    """Sums over the ranks twice forward, because a variance from the true mean loses no digits, and once backward."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, ...]:
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        over = [dimension for dimension in range(x.dim()) if dimension != 1]
        local = x.new_full((1,), x.numel() / x.shape[1])
        totals = torch.cat([x.sum(over), local])
        dist.all_reduce(totals, group=group)
        count = totals[-1]
        mean = totals[:-1] / count
        centred = x - _along(mean, x)
        squares = centred.square().sum(over)
        dist.all_reduce(squares, group=group)
        variance = squares / count
        scale = (variance + eps).rsqrt()
        normal = centred.mul_(_along(scale, x))
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.over, ctx.group, ctx.dtype = over, group, input.dtype
        output = normal
        if weight is not None:
            output = output * _along(weight, x)
        if bias is not None:
            output = output + _along(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype) if output is not normal else normal.clone().to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = gradients[0]
        normal, weight, scale, count = ctx.saved_tensors
        gradient = gradient.to(normal.dtype)
        sum_gradient = gradient.sum(ctx.over)
        sum_product = (gradient * normal).sum(ctx.over)
        for_input = None
        if ctx.needs_input_grad[0]:
            # The gradients of mean and variance, which all ranks share; the loss is the sum over the ranks.
            totals = torch.cat([sum_gradient, sum_product])
            dist.all_reduce(totals, group=ctx.group)
            about_mean, about_variance = (_along(part / count, normal) for part in totals.chunk(2))
            factor = scale if weight is None else scale * weight
            for_input = (_along(factor, normal) * (gradient - about_mean - normal * about_variance)).to(ctx.dtype)
        # DDP averages the gradients of weight and bias, as of all parameters.
        for_weight = sum_product if weight is not None and ctx.needs_input_grad[1] else None
        for_bias = sum_gradient if ctx.needs_input_grad[2] else None
        return for_input, for_weight, for_bias, None, None


def _along(channels: Tensor, like: Tensor) -> Tensor:
    """Returns one value per channel, in a shape that broadcasts with ``like``."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
