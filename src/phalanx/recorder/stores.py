"""Which store a rank is connecting to, noted in its status page: nobody may listen there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore

from phalanx import status
from phalanx.recorder import flight_reader
from phalanx.status import layout
from phalanx.torch_compat import c10d


def install() -> None:
    c10d.STORE_INIT.wrap(_noting)


def _noting(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def __init__(self: TCPStore, *args: Any, **kwargs: Any) -> None:
        page = status.own()
        if page is None:
            plain(self, *args, **kwargs)
            return
        # Its thread can tell where this one stands. Asked by a signal, torch would print the C++ stack of the call.
        if flight_reader.is_there():
            flight_reader.begin()
        names = dict(zip(("host_name", "port"), args, strict=False)) | kwargs
        page.connecting(f"{names.get('host_name')}:{names.get('port')}")
        # Within init_process_group that is what the rank waits in.
        told = contextlib.nullcontext() if page.is_joining else status.waiting(layout.STORE)
        try:
            with told:
                plain(self, *args, **kwargs)
        finally:
            page.connecting("")

    return __init__
