"""Order among the ranks: barrier, rank_zero_first, main_only and print; and the time in collectives."""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from phalanx import cluster
from phalanx import world as worlds
from phalanx.argparser import shown
from phalanx.devices import accelerator
from phalanx.errors import PeerFailed, UsageError
from phalanx.status import layout, own_page
from phalanx.store.primitives import read, wait_for, write
from phalanx.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

_P = ParamSpec("_P")
_R = TypeVar("_R")
_turns = {False: itertools.count(), True: itertools.count()}


def barrier() -> None:
    """Returns when every rank has called it; at once in a world of one."""
    world = worlds.current()
    if world.size == 1:
        return
    import torch.distributed as dist

    if accelerator.own_backend(world.backend, world.device):
        dist.barrier(device_ids=[world.device.index])
    else:
        dist.barrier()


@contextlib.contextmanager
def rank_zero_first(local: bool = False) -> Iterator[None]:
    """Rank zero runs the body, then all others do: for preparing data once.

    With ``local=True`` local rank zero of each node goes first, for data that every node keeps by itself. If the
    body raises on the first, the others raise PeerFailed instead of waiting for ever; if it takes long, they wait,
    whatever the group's timeout is.
    """
    world = worlds.current()
    if world.size == 1:
        yield
        return
    store = world.store
    assert store is not None, "several ranks share a store"
    leader = _first_of_the_node(world) if local else 0
    key = f"phalanx/first/{local}/{next(_turns[local])}/{leader}"
    if world.rank != leader:
        with own_page.waiting(layout.RANK_ZERO_FIRST, peer=leader):
            _follow(world, store, leader, key)
        yield
        return
    try:
        yield
    except BaseException as error:
        write(store, key, f"{type(error).__name__}: {error}")
        raise
    write(store, key, "")


def _first_of_the_node(world: World) -> int:
    """Returns the smallest rank on this host: launchers may give ranks to the nodes in turn."""
    if not world.claims:
        return world.rank - world.local_rank
    here = world.claims[world.rank].host
    return min(claim.rank for claim in world.claims if claim.host == here)


def _follow(world: World, store: Store, leader: int, key: str) -> None:
    from torch.distributed import DistNetworkError

    def died(_: float) -> PeerFailed | None:
        has_died = world.claims and world.claims[leader].has_died
        return PeerFailed(f"rank {leader}, which goes first here, has died; see its log.") if has_died else None

    try:
        wait_for(store, key, look=died)
        failure = read(store, key, str)
    except DistNetworkError:
        raise PeerFailed(f"rank {leader}, which goes first here, took the store with it; see its log.") from None
    if failure:
        raise PeerFailed(f"rank {leader} went first and failed with {failure}.")


def _rank() -> int:
    """Returns the rank of this process, also before it has joined."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return cluster.find(os.environ).rank


def main_only(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorates a function to run on rank 0 alone; on the others it returns None."""
    if not callable(function):
        raise UsageError(f"main_only got {shown(function)}, which cannot be called; give a function.")

    @functools.wraps(function)
    def on_main(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        return function(*args, **kwargs) if _rank() == 0 else None

    return on_main


def print(*values: object, **options: Any) -> None:
    """The built-in print, on rank 0 alone."""
    if _rank() == 0:
        builtins.print(*values, **options)


def seconds_in_collectives() -> float | None:
    """Returns the seconds in collectives of the default group so far, with the waiting for other ranks.

    None when the backend does not count them, such as torch's own.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return 0.0
    return getattr(dist.group.WORLD, "seconds_in_collectives", None)
