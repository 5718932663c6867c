"""Plans reductions across nodes: the operator within each node, the one between nodes, and the final division.

Between nodes gloo reduces where it gives exactly what the library gives. Where it does not (it loses the NaN in a MIN,
and lacks some types) the nodes send each other their blocks, and every rank combines them here, in the order of nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.shm.node.tensors import REDUCE_NAMES, Operator

Between = Literal["sum", "product", "min", "max", "band", "bor", "bxor"]

_HALVES = (torch.float16, torch.bfloat16)
_UNSIGNED = tuple(getattr(torch, name) for name in ("uint16", "uint32", "uint64"))
"""torch has no arithmetic for these types; numpy has."""
_NARROW = (torch.int8, torch.int16, torch.int32, *(getattr(torch, name) for name in ("uint8", "uint16", "uint32")))


@dataclass(frozen=True)
class Reduction:
    within: Operator
    """Within a node, in shared memory."""
    between: Between
    """Between the nodes."""
    divisor: int = 1
    """The number that the result is divided by at the end."""


def plan(operator: Operator, dtype: torch.dtype, ranks: int) -> Reduction:
    """Returns how to reduce over so many ranks."""
    name = REDUCE_NAMES[operator.code]
    if name == "premul_sum":
        return Reduction(operator, "sum")
    if name == "avg" and dtype in _HALVES:
        # Divided before it is added up, in float32: a sum of many halves could overflow.
        return Reduction(Operator(REDUCE_NAMES.index("premul_sum"), 1.0 / ranks), "sum")
    if name == "avg":
        return Reduction(Operator(REDUCE_NAMES.index("sum")), "sum", ranks)
    return Reduction(operator, name)


def widened(block: Tensor, reduction: Reduction) -> Tensor | None:
    """Returns a copy of a wider type for an average whose sum could overflow. 64 bits are not widened."""
    return block.to(torch.int64) if reduction.divisor > 1 and block.dtype in _NARROW else None


# ---- by gloo

_ON_BITS: dict[Between, Between] = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}
"""The same operators for bool, whose elements are 0 or 1."""
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def by_gloo(block: Tensor, between: Between, nodes: int) -> tuple[Tensor, dist.ReduceOp.RedOpType] | None:
    """Returns the block as gloo should see it, and gloo's operator; None if gloo would give another result.

    Between two nodes it takes no longer to exchange whole blocks, and then halves are added up in float32. gloo rounds
    their sum at each node, but sends less when there are more nodes.
    """
    if block.dtype == torch.bool:
        return block.view(torch.uint8), getattr(dist.ReduceOp, _ON_BITS.get(between, between).upper())
    floats = (torch.float32, torch.float64, *(_HALVES if nodes > 2 else ()))
    if block.dtype in _INTEGERS or (block.dtype in floats and between in ("sum", "product")):
        return block, getattr(dist.ReduceOp, between.upper())
    return None


# ---- here

_STEPS: dict[Between, tuple[Callable[[Tensor, Tensor], Tensor], numpy.ufunc]] = {
    "sum": (torch.add, numpy.add),
    "product": (torch.mul, numpy.multiply),
    "min": (torch.minimum, numpy.minimum),
    "max": (torch.maximum, numpy.maximum),
    "band": (torch.bitwise_and, numpy.bitwise_and),
    "bor": (torch.bitwise_or, numpy.bitwise_or),
    "bxor": (torch.bitwise_xor, numpy.bitwise_xor),
}


def combine(blocks: Sequence[Tensor], between: Between) -> Tensor:
    """Reduces the blocks from the first to the last; half precision in float32, rounded once."""
    dtype = blocks[0].dtype
    if dtype == torch.bool:
        between = _ON_BITS.get(between, between)
    by_torch, by_numpy = _STEPS[between]
    if dtype in _UNSIGNED:
        return torch.from_numpy(functools.reduce(by_numpy, [block.numpy() for block in blocks]))
    return functools.reduce(by_torch, [block.float() for block in blocks] if dtype in _HALVES else blocks).to(dtype)


def divide(block: Tensor, divisor: int) -> None:
    """Divides in place; integers are truncated, as in the library."""
    if divisor == 1:
        return
    if block.dtype in _UNSIGNED:
        array = block.numpy()
        numpy.floor_divide(array, divisor, out=array)
    else:
        block.div_(divisor, rounding_mode=None if block.is_floating_point() else "trunc")
