"""One message between two ranks of a node, as the work that torch waits for."""

from __future__ import annotations

import contextlib
import ctypes
import time
from datetime import timedelta

from torch import Tensor

from phalanx.shm.node.failures import CollectiveTimeout, Names
from phalanx.shm.node.status_log import StatusLog
from phalanx.shm.node.tensors import DTYPE_NAMES, Staging, code_of, contiguous
from phalanx.shm.node.work_queue import Work
from phalanx.status import layout


class Message(Work):
    """A send or a receive."""

    def __init__(
        self, tensor: Tensor, peer: int | None, tag: int, received: bool, names: Names, status_log: StatusLog
    ) -> None:
        super().__init__([tensor])
        self.peer, self.tag, self.received = peer, tag, received
        self._staging, self._names, self._status_log = Staging(), names, status_log
        block = self._staging.write(tensor) if received else contiguous(tensor)
        self._block = block
        self.code, width = code_of(block)
        self.count = block.numel()
        self.moved = 0.0
        """Time of the last piece that was sent or received, by time.monotonic()."""
        self.bytes = memoryview((ctypes.c_char * (self.count * width)).from_address(block.data_ptr())).cast("B")

    def finish(self, peer: int) -> None:
        self.peer = peer
        if self.received:
            self._staging.finish()
        self.end(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        given = timeout.total_seconds()
        limit = given if given > 0 else self._names.timeout
        if self.is_completed():
            return super().wait()
        began = time.monotonic()
        with self._status_log.waiting(layout.RECV if self.received else layout.SEND, self._block, self.peer):
            while (left := max(began, self.moved) + limit - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):  # the limit counts from the last piece
                    return super().wait(timedelta(seconds=max(left, 0.001)))
        raise CollectiveTimeout(f"the timeout of {limit:g} s is over: {self}.")

    def _source_rank(self) -> int:
        """torch calls it after a receive from any rank."""
        assert self.peer is not None, "asked before it was received"
        return self.peer

    def __str__(self) -> str:
        who = "any rank" if self.peer is None else self._names(self.peer)
        what = f"{spell(self.code, self.count)} with tag {self.tag} in group '{self._names.group}'"
        return f"{who} has not sent {what}" if self.received else f"{who} has not received {what}"


def spell(code: int, count: int) -> str:
    return f"{DTYPE_NAMES[code]}[{count}]"
