"""What a group does, noted in the status page of this rank, if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from phalanx import status
from phalanx.status import layout

_OTHER = layout.DTYPES.index("other")
_DTYPES = {getattr(torch, layout.DTYPES[code]): code for code in range(1, _OTHER)}


def dtype_code(dtype: torch.dtype) -> int:
    return _DTYPES.get(dtype, _OTHER)


class Logbook:
    """Of one group."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.page = status.own()
        self._group = self.page.group(name, ranks) if self.page is not None else layout.NO_GROUP
        self._kinds: dict[tuple[int, torch.dtype | None], int] = {}
        self._number = 0

    def begin(self, op: int, tensor: Tensor | None, is_running: bool) -> int:
        """A collective that somebody asks for now; what is returned is for the page's `start` and `end`."""
        assert self.page is not None
        self._number = number = self._number + 1
        if tensor is None:
            return self.page.begin(self._kind(op, None), number, 0, is_running)
        dtype = tensor.dtype
        kind = self._kinds.get((op, dtype)) or self._kind(op, dtype)
        return self.page.begin(kind, number, tensor.numel(), is_running)

    def waiting(self, op: int, tensor: Tensor, peer: int | None) -> AbstractContextManager[None]:
        """While a message is waited for."""
        kind = self._kind(op, tensor.dtype)
        return status.waiting(op, kind, layout.NO_PEER if peer is None else peer, tensor.numel())

    def _kind(self, op: int, dtype: torch.dtype | None) -> int:
        code = 0 if dtype is None else dtype_code(dtype)
        self._kinds[op, dtype] = kind = layout.kind_of(self._group, op, code)
        return kind
