"""`assert_parallel_equal` lets good models pass, and says of the others what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.testing import assert_parallel_equal


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(24, 6), torch.randint(0, 3, (24,))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))


def with_both() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))


class Centred(nn.Module):
    """Looks at the other samples of the batch, in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


class Wilful(nn.Module):
    """Changes a parameter by itself, by what this rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        with torch.no_grad():
            self.layer.bias.add_(0.01 * x.mean())
        return out


def summed(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum") / 24


def test_a_good_model_passes(run_ranks: Any) -> None:
    assert_parallel_equal(plain, make_batch, world_sizes=(1, 2, 3))


def test_batch_norm_passes_when_it_is_synchronised(run_ranks: Any) -> None:
    assert_parallel_equal(with_batch_norm, make_batch, world_sizes=(2,), sync_batchnorm=True)


@pytest.mark.parametrize(
    ("make_model", "loss", "text"),
    [
        (
            with_batch_norm,
            None,
            "BatchNorm normalises each rank's part of the batch by itself; give sync_batchnorm=True",
        ),
        (with_dropout, None, "dropout drew other numbers"),
        (with_both, None, r"BatchNorm normalises .*; and dropout drew other numbers"),
        (plain, summed, r"every gradient is 0\.5 times what it should be"),
        (Centred, None, r"layer.weight differs by .* Something depends on the other samples"),
        (Wilful, None, "the replicas differ after step 0"),
    ],
    ids=["batch norm", "dropout", "both", "loss", "other", "replicas"],
)
def test_the_reason_is_told(make_model: Callable[[], nn.Module], loss: Any, text: str, run_ranks: Any) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_parallel_equal(make_model, make_batch, world_sizes=(2,), loss=loss)


def test_a_batch_that_cannot_be_cut(run_ranks: Any) -> None:
    with pytest.raises(Exception, match="a batch of 24 samples has no equal parts for 5 ranks"):
        assert_parallel_equal(plain, make_batch, world_sizes=(5,))
