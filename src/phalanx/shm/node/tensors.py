"""What the library calls torch's types and operators, and stand-ins for tensors that do not lie in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx import torch_compat
from phalanx.errors import UsageError
from phalanx.native import library
from phalanx.torch_compat.tensors import zero_check

# In the order of enum phx_dtype. What comes after the first 13 is moved, not reduced.
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(getattr(torch, name) for name in ("complex32", "float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)),
    *(getattr(torch, name) for name in ("float8_e4m3fnuz", "float8_e5m2fnuz") if hasattr(torch, name)),
)
_CODES = {dtype: (code, dtype.itemsize) for code, dtype in enumerate(_DTYPES)}
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in _DTYPES]

REDUCE_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_REDUCES = {getattr(ReduceOp.RedOpType, name.upper()): code for code, name in enumerate(REDUCE_NAMES)}
_is_zero = zero_check()
_SUM, _AVG, _PREMUL = (REDUCE_NAMES.index(name) for name in ("sum", "avg", "premul_sum"))


def code_of(tensor: Tensor) -> tuple[int, int]:
    """The library's number for the tensor's type, and the bytes of an element."""
    try:
        return _CODES[tensor.dtype]
    except KeyError:
        raise UsageError(f"backend 'shm' does not know {tensor.dtype}; convert the tensor, or use gloo.") from None


def width_of(code: int) -> int:
    """The bytes of an element of the type with this number."""
    return _DTYPES[code].itemsize


def reduce_of(op: Any) -> tuple[int, float]:
    """The library's number for a ReduceOp, and its factor."""
    code = _REDUCES[op.op]
    return code, torch_compat.factor_of(op) if code == _PREMUL else 0.0


def numbers_of(tensor: Tensor, reduce: int, name: str) -> tuple[int, int, int]:
    """What a reduction works on: the library's type, the bytes and the number of its elements.

    A complex number counts as two real ones, with the operators that allow it."""
    code, width = code_of(tensor)
    count = tensor.numel()
    if tensor.is_complex() and reduce in (_SUM, _AVG, _PREMUL):
        code, width = _CODES[tensor.dtype.to_real()]
        count *= 2
    if not library.library().phx_can_reduce(code, reduce):
        raise UsageError(f"{name} cannot use {REDUCE_NAMES[reduce].upper()} on {DTYPE_NAMES[code]}.")
    return code, width, count


def check_blocks(blocks: Sequence[Tensor] | Tensor, like: Tensor, ranks: int, name: str) -> None:
    """There is a block for each rank, and every one has the shape and type of the others."""
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
    """The blocks of a tensor in one piece; without sizes, equal ones."""
    if sizes:
        return tensor.split(list(sizes))
    if tensor.dim() and tensor.size(0) % ranks:
        raise UsageError(f"all_to_all_single got {tensor.size(0)} rows for {ranks} ranks; give split sizes.")
    return tensor.view(-1).chunk(ranks) if tensor.numel() else [tensor] * ranks


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def is_in_one_piece(tensor: Tensor) -> bool:
    """Whether its elements can be read and written where they lie, one after the other."""
    if not tensor.is_cpu:
        raise UsageError(f"backend 'shm' moves tensors in memory, but this one is on {tensor.device}; use nccl there.")
    try:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        address = tensor.data_ptr()
    except RuntimeError:  # torch's, for what has no memory at all
        return False
    # A tensor made of a buffer may begin anywhere; the vector code relies on whole elements. Without an address the
    # tensor is empty, or none that lies in memory.
    return not address % tensor.itemsize and (address != 0 or not tensor.numel())


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or the one that it stands for; UsageError where there is none."""
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


def in_one_piece(tensor: Tensor) -> Tensor:
    """The tensor itself where its elements lie one after the other, otherwise a copy of them that does."""
    if is_in_one_piece(tensor) or is_in_one_piece(tensor := in_memory(tensor)):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class Staging:
    """Stand-ins, each in one piece, for the tensors of a collective that are not; written back at its end.

    It holds them as long as it lives: the library is given addresses alone.
    """

    __slots__ = ("_read", "_written")

    def __init__(self) -> None:
        self._read: list[Tensor] = []
        self._written: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        block = in_one_piece(tensor)
        if block is not tensor:
            self._read.append(block)
        return block

    def write(self, tensor: Tensor) -> Tensor:
        """For a tensor that is only written."""
        return self._stand_in(tensor, lambda inside: torch.empty(inside.shape, dtype=inside.dtype))

    def update(self, tensor: Tensor) -> Tensor:
        """For one that is read and written."""
        return self._stand_in(tensor, in_one_piece)

    def _stand_in(self, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        if is_in_one_piece(tensor) or is_in_one_piece(tensor := in_memory(tensor)):
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
