"""Reductions across nodes: what each node does for itself, what is done between them, and what comes last.

Between nodes gloo adds up, where it does exactly what the library does. Where it does not (a NaN that MIN loses, types
that it does not know) the nodes send each other what they have, and everybody adds it up here, in the order of nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.shm.node.tensors import REDUCE_NAMES

_HALVES = (torch.float16, torch.bfloat16)
_UNSIGNED = tuple(getattr(torch, name) for name in ("uint16", "uint32", "uint64"))
"""torch can hold these and do little with them; numpy can."""
_NARROW = (torch.int8, torch.int16, torch.int32, *(getattr(torch, name) for name in ("uint8", "uint16", "uint32")))


@dataclass(frozen=True)
class Operator:
    """What the library wants to know of a ReduceOp."""

    op: Any
    factor: float = 0.0


@dataclass(frozen=True)
class Reduction:
    within: Operator
    """Within a node, in shared memory."""
    between: str
    """Between the nodes: sum, product, min, max, band, bor, bxor."""
    divisor: int = 1
    """Of the sum, at the end."""


def plan(reduce: int, factor: float, dtype: torch.dtype, ranks: int) -> Reduction:
    """How to do the library's operator ``reduce`` with so many ranks."""
    name = REDUCE_NAMES[reduce]
    if name == "premul_sum":
        return Reduction(_operator(name, factor), "sum")
    if name == "avg" and dtype in _HALVES:
        # Divided before it is added up, in float32: a sum of many halves could be too large for one.
        return Reduction(_operator("premul_sum", 1.0 / ranks), "sum")
    if name == "avg":
        return Reduction(_operator("sum"), "sum", ranks)
    return Reduction(_operator(name), name)


def widened(block: Tensor, reduction: Reduction) -> Tensor | None:
    """A copy to take the average in, where the sum may be too large for the type. There is nothing above 64 bits."""
    return block.to(torch.int64) if reduction.divisor > 1 and block.dtype in _NARROW else None


def _operator(name: str, factor: float = 0.0) -> Operator:
    return Operator(getattr(ReduceOp.RedOpType, name.upper()), factor)


# ---- by gloo

_ON_BITS = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}
"""Of bool, which is 0 or 1."""
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def by_gloo(block: Tensor, between: str, nodes: int) -> tuple[Tensor, Any] | None:
    """The block as gloo should see it, and gloo's operator; None where gloo would do something else.

    Between two nodes it takes no longer to send everything to each other, and then halves are added up in float32.
    gloo rounds their sum for each node, but sends less when there are more nodes.
    """
    if block.dtype == torch.bool:
        return block.view(torch.uint8), _gloo(_ON_BITS.get(between, between))
    floats = (torch.float32, torch.float64, *(_HALVES if nodes > 2 else ()))
    if block.dtype in _INTEGERS or (block.dtype in floats and between in ("sum", "product")):
        return block, _gloo(between)
    return None


def _gloo(name: str) -> Any:
    return getattr(ReduceOp, name.upper())


# ---- here

_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_NUMPY_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": numpy.add,
    "product": numpy.multiply,
    "min": numpy.minimum,
    "max": numpy.maximum,
    "band": numpy.bitwise_and,
    "bor": numpy.bitwise_or,
    "bxor": numpy.bitwise_xor,
}


def combine(blocks: Sequence[Tensor], between: str) -> Tensor:
    """All of them in one, from the first to the last; half precision in float32 and rounded once."""
    dtype = blocks[0].dtype
    if dtype in _UNSIGNED:
        return torch.from_numpy(functools.reduce(_NUMPY_STEPS[between], [block.numpy() for block in blocks]))
    if dtype == torch.bool:
        between = _ON_BITS.get(between, between)
    wide = [block.float() for block in blocks] if dtype in _HALVES else blocks
    return functools.reduce(_STEPS[between], wide).to(dtype)


def divide(block: Tensor, divisor: int) -> None:
    """In place; integers are cut, as the library does it."""
    if divisor == 1:
        return
    if block.dtype in _UNSIGNED:
        array = block.numpy()
        numpy.floor_divide(array, divisor, out=array)
    elif block.is_floating_point():
        block.div_(divisor)
    else:
        block.div_(divisor, rounding_mode="trunc")
