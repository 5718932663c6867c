"""Tensors as the C library and the network see them: numbers for types and operators, contiguous memory, bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx import torch_compat
from phalanx.errors import UsageError
from phalanx.native import library
from phalanx.torch_compat.tensors import zero_check

Blocks = Sequence[Tensor] | Tensor
"""A block for each rank: in tensors of their own, or one after the other in one."""

# In the order of enum phx_dtype. Types after the first 13 can be moved, but not reduced.
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(getattr(torch, name) for name in ("complex32", "float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)),
    *(getattr(torch, name) for name in ("float8_e4m3fnuz", "float8_e5m2fnuz") if hasattr(torch, name)),
)
_CODES = {dtype: (code, dtype.itemsize) for code, dtype in enumerate(_DTYPES)}
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in _DTYPES]

REDUCE_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
REDUCE_CODES: dict[int, int] = {
    getattr(ReduceOp.RedOpType, name.upper()).value: code for code, name in enumerate(REDUCE_NAMES)
}
"""The library's numbers of operators, by torch's."""
_SUM, _AVG, _PREMUL = (REDUCE_NAMES.index(name) for name in ("sum", "avg", "premul_sum"))
_is_zero = zero_check()


class Operator(NamedTuple):
    """A reduction operator as the library knows it."""

    code: int
    factor: float = 0.0
    """Only for premul_sum."""


def operator_of(op: ReduceOp) -> Operator:
    code = REDUCE_CODES[op.op.value]  # pyright: ignore[reportAttributeAccessIssue] (torch's stubs lack it)
    return Operator(code, torch_compat.factor_of(op) if code == _PREMUL else 0.0)


def code_of(tensor: Tensor) -> tuple[int, int]:
    """Returns the library's number for the tensor's type, and the bytes of an element."""
    try:
        return _CODES[tensor.dtype]
    except KeyError:
        raise UsageError(f"backend 'shm' does not know {tensor.dtype}; convert the tensor, or use gloo.") from None


def width_of(code: int) -> int:
    """Returns the bytes of an element of the type with this number."""
    return _DTYPES[code].itemsize


def numbers_of(tensor: Tensor, operator: Operator, name: str) -> tuple[int, int, int]:
    """Returns the library's type for a reduction, and the bytes and the number of its elements.

    A complex number counts as two real ones, with the operators that allow it.
    """
    code, width = code_of(tensor)
    count = tensor.numel()
    if tensor.is_complex() and operator.code in (_SUM, _AVG, _PREMUL):
        code, width = _CODES[tensor.dtype.to_real()]
        count *= 2
    if not library.library().phx_can_reduce(code, operator.code):
        raise UsageError(f"{name} cannot use {REDUCE_NAMES[operator.code].upper()} on {DTYPE_NAMES[code]}.")
    return code, width, count


# ---- tensors that go together


def check_blocks(blocks: Blocks, like: Tensor, ranks: int, name: str) -> None:
    """Checks that there is a block for each rank, and that all have one shape and type."""
    if isinstance(blocks, Tensor):
        rows, *columns = like.shape or (1,)
        in_a_row, as_a_stack = (rows * ranks, *columns), (ranks, *like.shape)
        if tuple(blocks.shape) not in (in_a_row, as_a_stack) or blocks.dtype != like.dtype:
            raise UsageError(
                f"{name} got a {_describe(blocks)} beside a {_describe(like)}; "
                f"the first needs the shape {list(in_a_row)} or {list(as_a_stack)}, and the same type."
            )
        return
    if len(blocks) != ranks:
        raise UsageError(f"{name} got {len(blocks)} tensors for {ranks} ranks; give one for each.")
    for tensor in blocks:
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise UsageError(
                f"{name} got a {_describe(tensor)} beside a {_describe(like)}; all blocks need one shape and type."
            )


def check_exchange(outputs: Sequence[Tensor], inputs: Sequence[Tensor], ranks: int) -> None:
    if len(inputs) != ranks or len(outputs) != ranks:
        raise UsageError(f"all_to_all got {len(inputs)} inputs and {len(outputs)} outputs for {ranks} ranks.")
    kinds = {tensor.dtype for tensor in (*inputs, *outputs)}
    if len(kinds) > 1:  # an output of smaller elements would be written past its end
        raise UsageError(f"all_to_all got tensors of {', '.join(sorted(map(str, kinds)))}; give one type.")


def split(tensor: Tensor, sizes: Sequence[int], ranks: int) -> Sequence[Tensor]:
    """Returns the blocks of a contiguous tensor; without sizes, equal ones."""
    if sizes:
        return tensor.split(list(sizes))
    if tensor.dim() and tensor.size(0) % ranks:
        raise UsageError(f"all_to_all_single got {tensor.size(0)} rows for {ranks} ranks; give split sizes.")
    return tensor.view(-1).chunk(ranks) if tensor.numel() else [tensor] * ranks


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# ---- tensors in memory


def is_contiguous(tensor: Tensor) -> bool:
    """Returns whether the elements can be read and written in place, one after the other."""
    if not tensor.is_cpu:
        raise UsageError(f"backend 'shm' moves tensors in memory, but this one is on {tensor.device}; use nccl there.")
    try:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        address = tensor.data_ptr()
    except RuntimeError:  # torch's, for a tensor without any memory
        return False
    # A tensor made of a buffer may begin anywhere, but the vector code needs whole elements. A tensor without an
    # address is empty, or has no memory.
    return not address % tensor.itemsize and (address != 0 or not tensor.numel())


def materialized(tensor: Tensor) -> Tensor:
    """Returns the tensor itself, or the one that it stands for; UsageError if there is none."""
    wait = getattr(tensor, "trigger_wait", None)
    if wait is not None:  # torch's AsyncCollectiveTensor, the result of a functional collective
        tensor = wait()
    try:
        if tensor.layout is torch.strided and (_is_zero(tensor) or not tensor.numel() or tensor.data_ptr()):
            return tensor
    except RuntimeError:
        pass  # it cannot have an address
    if hasattr(tensor, "to_local"):
        advice = "give its to_local()"
    elif type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        advice = "its storage has been freed, or belongs to a transform such as vmap"
    else:
        advice = "give the plain tensor that it stands for"
    kind = type(tensor).__name__ if tensor.layout is torch.strided else f"tensor of layout {tensor.layout}"
    raise UsageError(f"backend 'shm' got a {kind} of shape {list(tensor.shape)} with no memory of its own: {advice}.")


def contiguous(tensor: Tensor) -> Tensor:
    """Returns the tensor itself if it is contiguous, otherwise a copy that is."""
    if is_contiguous(tensor) or is_contiguous(tensor := materialized(tensor)):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class Staging:
    """Contiguous buffers for the tensors of one collective that are not contiguous; `finish` copies them back."""

    __slots__ = ("_written",)

    def __init__(self) -> None:
        self._written: list[tuple[Tensor, Tensor]] = []

    def write(self, tensor: Tensor) -> Tensor:
        """Returns the memory for a tensor that is only written."""
        return self._stage(tensor, lambda inside: torch.empty(inside.shape, dtype=inside.dtype))

    def update(self, tensor: Tensor) -> Tensor:
        """Returns the memory for a tensor that is read and written."""
        return self._stage(tensor, contiguous)

    def _stage(self, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        if is_contiguous(tensor) or is_contiguous(tensor := materialized(tensor)):
            return tensor
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise UsageError(
                f"backend 'shm' cannot write to an expanded tensor of shape {list(tensor.shape)}: several elements are "
                "one number in memory; give its clone()."
            )
        block = make(tensor)
        self._written.append((tensor, block))
        return block

    def finish(self) -> None:
        for tensor, block in self._written:
            if not _is_zero(tensor):
                tensor.detach().copy_(block)
            elif block.any():
                raise UsageError("a ZeroTensor cannot hold the result of a collective; give its clone().")


# ---- contiguous tensors as flat numbers and as bytes


def flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def real(block: Tensor) -> Tensor:
    """Returns the block as real numbers: a complex number counts as two."""
    return torch.view_as_real(block).view(-1) if block.is_complex() else block


def as_bytes(block: Tensor) -> Tensor:
    return real(flat(block)).view(torch.uint8)


def typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns bytes, which may begin anywhere, as elements."""
    if dtype.is_complex:
        return torch.view_as_complex(typed(data, dtype.to_real()).view(-1, 2))
    return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)


def memory(block: Tensor) -> memoryview:
    return as_bytes(block).numpy().data


def read(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Returns a copy, because what comes from the network is not aligned."""
    return torch.frombuffer(bytearray(data), dtype=dtype)


def write(block: Tensor, data: memoryview) -> None:
    if len(data):
        memory(block)[:] = data
