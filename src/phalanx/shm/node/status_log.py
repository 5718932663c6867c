"""The collectives and messages of a group in the status page of this rank, if it has one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from phalanx.native import library
from phalanx.status import layout, own_page

_OTHER = layout.DTYPES.index("other")
_DTYPES = {getattr(torch, layout.DTYPES[code]): code for code in range(1, _OTHER)}


class StatusLog(dict[tuple[int, torch.dtype | None], int]):
    """The page's numbers for the operations of one group, by operation and type; the type is None without a tensor."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        super().__init__()
        self.page = own_page.current()
        self.native: library.Log | None = None
        self._group = self.page.group(name, ranks) if self.page is not None else layout.NO_GROUP

    def __missing__(self, key: tuple[int, torch.dtype | None]) -> int:
        op, dtype = key
        code = 0 if dtype is None else _DTYPES.get(dtype, _OTHER)
        self[key] = kind = layout.kind_of(self._group, op, code)
        return kind

    def native_log(self) -> library.Log | None:
        """Makes the record by which the C library writes to the page while a collective runs."""
        if self.page is None:
            return None
        memory = ctypes.addressof(ctypes.c_char.from_buffer(self.page.memory))

        def at(word: int) -> int:
            return memory + word * layout.WORD

        self.native = library.Log(
            no_peer=layout.NO_PEER,
            entries=layout.RING_ENTRIES,
            ring=at(layout.RING),
            waited=at(layout.WAITED),
            blocked=at(layout.BLOCKED),
            phase=at(layout.LOOP + 1),
            blocked_since=at(layout.BLOCKED_SINCE),
            thread=self.page.thread,
        )
        return self.native

    def waiting(self, op: int, tensor: Tensor, peer: int | None) -> AbstractContextManager[None]:
        """Shows in the page that this rank waits for a message."""
        peer = layout.NO_PEER if peer is None else peer
        return own_page.waiting(op, self[op, tensor.dtype], peer, tensor.numel())
