"""Notes where a rank waits for other ranks outside of shm: in a collective, in send and recv, or for a store.

The rest of a step is its own work. The wait at the end of backward is noted in `ddp_models`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch.distributed import TCPStore

from phalanx.recorder import flight_reader
from phalanx.recorder.around import around
from phalanx.status import layout, own_page
from phalanx.status.page import StatusPage
from phalanx.torch_compat import FLIGHT_RECORDER_IS_ON, c10d, release
from phalanx.torch_compat.nn import DDP_BROADCAST


def install() -> None:
    if not dist.is_available():
        return
    has_names = flight_reader.is_recording() and release() >= FLIGHT_RECORDER_IS_ON  # older ones record nccl alone
    c10d.WAIT.wrap(around(_wait if has_names else _unnamed_wait))
    DDP_BROADCAST.wrap(around(_wait))
    c10d.STORE_INIT.wrap(around(_connect))
    for name, op in ((c10d.SEND, layout.SEND), (c10d.RECV, layout.RECV)):
        name.wrap(functools.partial(_noting_peer, op))


def _wait(page: StatusPage, *_: object, **__: object) -> AbstractContextManager[None] | None:
    return _blocked(page) if page.block() else None


@contextlib.contextmanager
def _blocked(page: StatusPage) -> Iterator[None]:
    try:
        yield
    finally:
        page.unblock()
    page.tick()  # a collective has ended, whatever backend runs it


def _unnamed_wait(_: StatusPage, *__: object, **___: object) -> AbstractContextManager[None]:
    """The same where torch does not record which collective it is."""
    return own_page.waiting(layout.COLLECTIVE)


@contextlib.contextmanager
def _connect(page: StatusPage, _: TCPStore, *args: object, **kwargs: object) -> Iterator[None]:
    """Notes the address of a store, where perhaps no server listens."""
    # Its thread can write the stack of this one. Asked by a signal, torch would print the C++ stack of the call.
    if flight_reader.is_recording():
        flight_reader.begin()
    names = dict(zip(("host_name", "port"), args, strict=False)) | kwargs
    page.connecting(f"{names.get('host_name')}:{names.get('port')}")
    try:
        # Within init_process_group, it is that what the rank waits in.
        with contextlib.nullcontext() if page.phase == layout.JOINING else own_page.waiting(layout.STORE):
            yield
    finally:
        page.connecting("")


# ---- send and recv of other backends than shm: torch's flight recorder does not see those of gloo


def _noting_peer(op: int, plain: Callable[..., object]) -> Callable[..., object]:
    signature = inspect.signature(plain)

    def message(_: StatusPage, *args: object, **kwargs: object) -> AbstractContextManager[None] | None:
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group") or dist.group.WORLD
        if group is None or flight_reader.records_itself(group):
            return None
        peer = peer_of(given, group)
        return own_page.waiting(op, peer=layout.NO_PEER if peer is None else peer, size=given["tensor"].numel())

    return around(message)(plain)


def peer_of(given: Mapping[str, int | None], group: dist.ProcessGroup) -> int | None:
    """Returns the global rank of the other side; None: any rank. Newer versions of torch also take its group rank."""
    for global_name, group_name in (("src", "group_src"), ("dst", "group_dst")):
        if (rank := given.get(global_name)) is not None:
            return rank
        if (rank := given.get(group_name)) is not None:
            return dist.get_global_rank(group, rank)
    return None
