"""`assert_parallel_equal`: a model trains on many ranks as it does in one process; if not, the error has the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError
from phalanx.testing.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

    from phalanx.world import World

Tensors = dict[str, "Tensor"]
"""By the name of their parameter."""


@dataclass(frozen=True)
class _Work:
    """The training that each rank does."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[object, object]]
    loss: Callable[..., Tensor] | None
    steps: int
    learning_rate: float
    options: dict[str, Any]
    dropout: bool = True
    """False: turned off, to see whether it is the reason."""
    batch_norm: bool = True
    """False: with its running statistics, as in evaluation."""


@dataclass(frozen=True)
class _Outcome:
    """The result of a rank."""

    gradients: Tensors
    """The gradients of the first step."""
    parameters: Tensors
    equal_until: int
    """The number of steps after which the parameters were the same, bit for bit, on all ranks."""


def assert_parallel_equal(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], tuple[object, object]],
    world_sizes: Sequence[int] = (1, 2, 4),
    *,
    loss: Callable[..., Tensor] | None = None,
    steps: int = 3,
    learning_rate: float = 0.1,
    tolerance: float = 1e-4,
    **data_parallel: Any,
) -> None:
    """Trains the model on several numbers of ranks, on the same global batches, and compares with one process.

        def test_my_model():
            assert_parallel_equal(Net, lambda step: (torch.randn(16, 8), torch.randn(16, 1)))

    Real processes, `px.data_parallel`, SGD. When a result differs it raises AssertionError with the reason, if it is
    one of the usual ones: BatchNorm that sees a part of the batch, a loss that is a sum, dropout.

    Args:
        make_model: makes the model; called on every rank after the same seeding.
        make_batch: makes the inputs and targets of the whole batch of a step, tensors with the samples in their first
            dimension; called on every rank after the same seeding. Each rank takes its part.
        world_sizes: numbers of ranks; the number of samples must be a multiple of each.
        loss: takes the model's output and the targets; by default mean squared error for floating-point targets,
            cross entropy for whole numbers.
        tolerance: the largest difference of a parameter, relative to the largest change that training made to any.
        data_parallel: further arguments of `px.data_parallel`, such as ``sync_batchnorm=True``.
    """
    work = _Work(make_model, make_batch, loss, steps, learning_rate, data_parallel)
    alone = _run(work, 1)[0]
    for size in world_sizes:
        if size == 1:
            continue
        together = _run(work, size)
        _check_replicas(together, size, steps)
        if _difference(alone, together[0]) > tolerance:
            raise AssertionError(_explain(work, size, alone, together[0], tolerance))


def _run(work: _Work, size: int) -> list[_Outcome]:
    return run_ranks(functools.partial(_train, work=work), size, timeout=300.0)


def _train(world: World, work: _Work) -> _Outcome:
    """Trains on one rank. Its part of a batch is contiguous, as a loader would give it."""
    import torch

    from phalanx.parallel import data_parallel

    torch.manual_seed(0)
    bare = work.make_model().to(world.device)
    _switch(bare, work)
    before = {name: parameter.detach().clone() for name, parameter in bare.named_parameters()}
    model = data_parallel(bare, **work.options)
    optimizer = torch.optim.SGD(bare.parameters(), lr=work.learning_rate)
    gradients: Tensors = {}
    equal_until = 0
    for step in range(work.steps):
        torch.manual_seed(1 + step)
        inputs, targets = work.make_batch(step)
        torch.manual_seed(1000 * (1 + step) + world.rank)  # as in training: each rank draws its own dropout
        output = model(_part(inputs, world))
        optimizer.zero_grad()
        loss: Callable[..., Tensor] = work.loss or _usual_loss
        loss(output, _part(targets, world)).backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in bare.named_parameters() if p.grad is not None}
        optimizer.step()
        equal_until += equal_until == step and _is_equal_everywhere(bare, world)
    change = {name: (p.detach() - before[name]).cpu() for name, p in bare.named_parameters()}
    return _Outcome({name: gradient.cpu() for name, gradient in gradients.items()}, change, equal_until)


def _switch(model: nn.Module, work: _Work) -> None:
    from torch import nn

    dropout = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    batch_norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for module in model.modules():
        if isinstance(module, dropout) and not work.dropout:
            module.p = 0.0
        if isinstance(module, batch_norm) and not work.batch_norm:
            module.eval()


def _part(batch: object, world: World) -> object:
    from torch import Tensor

    from phalanx.torch_compat.tensors import tree_map_only

    def cut(tensor: Tensor) -> Tensor:
        samples = tensor.shape[0]
        if samples % world.size:
            raise UsageError(
                f"a batch of {samples} samples has no equal parts for {world.size} ranks; make it a multiple."
            )
        share = samples // world.size
        return tensor[world.rank * share : (world.rank + 1) * share].to(world.device)

    return tree_map_only(Tensor, cut, batch)


def _usual_loss(output: Tensor, target: Tensor) -> Tensor:
    from torch.nn import functional

    loss = functional.mse_loss if target.is_floating_point() else functional.cross_entropy
    return loss(output, target)


def _is_equal_everywhere(model: nn.Module, world: World) -> bool:
    """Compares bit for bit: the minimum and the maximum of each byte over all ranks are the same."""
    if world.size == 1:
        return True
    import torch
    import torch.distributed as dist

    own = torch.cat([p.detach().reshape(-1).contiguous().view(torch.uint8) for p in model.parameters()])
    low, high = own.clone(), own.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return torch.equal(low, high)


def _check_replicas(outcomes: list[_Outcome], size: int, steps: int) -> None:
    until = min(outcome.equal_until for outcome in outcomes)
    if until < steps:
        raise AssertionError(
            f"on {size} ranks the replicas differ after step {until}: something changes them without the exchange of "
            "gradients, such as parameters that are not registered, or a forward pass around the wrapped model."
        )


def _difference(one: _Outcome, other: _Outcome) -> float:
    """The largest difference of any parameter, relative to the largest change that training made to any."""
    scale = max((change.abs().max().item() for change in one.parameters.values() if change.numel()), default=0.0)
    worst = max(_differences(one, other).values(), default=0.0)
    return worst / scale if scale else worst


def _differences(one: _Outcome, other: _Outcome) -> dict[str, float]:
    return {
        name: (change - other.parameters[name]).abs().max().item()
        for name, change in one.parameters.items()
        if change.numel()
    }


def _explain(work: _Work, size: int, alone: _Outcome, together: _Outcome, tolerance: float) -> str:
    """Tries the usual reasons, each by turning it off on both sides."""
    from dataclasses import replace

    intro = f"on {size} ranks the model does not train as in one process"
    kinds = {
        "batch_norm": "BatchNorm normalises each rank's part of the batch by itself; give sync_batchnorm=True, "
        "or use a norm that looks at single samples",
        "dropout": "dropout drew other numbers, as it must; compare without it (p=0, or model.eval())",
    }
    for switched in ({"batch_norm": False}, {"dropout": False}, {"batch_norm": False, "dropout": False}):
        other = replace(work, **switched)
        without = _run(other, 1)[0]
        if _difference(without, alone) == 0.0:
            continue  # the model has nothing of the kind
        if _difference(without, _run(other, size)[0]) <= tolerance:
            return f"{intro}: {'; and '.join(kinds[name] for name in switched)}."
    ratio = _common_ratio(alone.gradients, together.gradients, tolerance)
    if ratio is not None:
        return (
            f"{intro}: every gradient is {ratio:.4g} times what it should be. Gradients are averaged over the ranks, "
            "so the loss must be the mean over a rank's samples, not their sum or a part of the whole batch's mean."
        )
    differences = _differences(alone, together)
    worst = max(differences, key=lambda name: differences[name])
    return (
        f"{intro}: {worst} differs by {differences[worst]:.3g} after {work.steps} steps. Something depends on the "
        "other samples of the batch, or draws random numbers."
    )


def _common_ratio(ours: Tensors, theirs: Tensors, tolerance: float) -> float | None:
    """The factor between all gradients, if one explains them all."""
    import torch

    one, other = (torch.cat([side[name].reshape(-1).double() for name in ours]) for side in (ours, theirs))
    ratio = (one @ other / (one @ one)).item()
    error = (other - ratio * one).abs().max().item()
    is_one_factor = error <= 10 * tolerance * other.abs().max().item()
    return ratio if is_one_factor and abs(ratio - 1) > tolerance else None
