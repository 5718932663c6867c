"""JOIN: which backend a process group gets. This is the only module that loads `shm`.

Under ``phalanx run`` a script on CPUs that asks for gloo, or for nothing, gets shm, which is many times as fast
between the processes of one machine, and between machines sends less. ``--backend as-written`` leaves the script's own
choice. Over several nodes all ranks vote on it: on each node something else may be missing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx import ballot, env, notices, status
from phalanx.errors import UsageError
from phalanx.status import layout

if TYPE_CHECKING:
    import torch

_INSTEAD_OF = (None, "gloo", "cpu:gloo")
_TIMEOUT = 1800.0
"""Seconds that torch waits for all ranks, unless it is told otherwise."""
_KEEP = "(--backend as-written keeps gloo)"
_installed = False


def choose(asked: str | None, world_size: int | None = None, timeout: float = _TIMEOUT) -> str | None:
    """The backend instead of ``asked``; ``asked`` itself, unless PHALANX_BACKEND is auto and shm can do it everywhere.

    Args:
        world_size: of the group that is to be formed; None: that of the run.
        timeout: seconds for the ranks of other nodes to say what they can.
    """
    choice = env.backend_choice(os.environ)
    if asked not in _INSTEAD_OF or choice is None:
        return asked
    size, here = (env.integer(os.environ, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    wants_shm = choice == "auto" and not _has_cards()
    if size is not None and size == here:
        return _choose_here(asked, size) if wants_shm else asked
    # Nothing known of the nodes, a world of the script's own making, or a launcher that is not ours.
    if size is None or here is None or world_size not in (None, size) or not ballot.has_store():
        return asked
    return _choose_together(asked, wants_shm, timeout)


def _choose_here(asked: str | None, size: int) -> str | None:
    reason = _why_not_here()
    if reason is not None:
        _tell(f"the backend is gloo: {reason}")
        return asked
    where = f"all {size} ranks are on this machine" if size > 1 else "there is one rank"
    _tell(f"the backend is shm, not gloo: {where} {_KEEP}")
    return "shm"


def _choose_together(asked: str | None, wants_shm: bool, timeout: float) -> str | None:
    """The same backend on all nodes. Who keeps gloo, by a flag or for a card, votes too: the others wait for it."""
    reason = _objection(_why_not_here() if wants_shm else "it keeps gloo, by --backend or for its card", timeout)
    if reason is None:
        nodes = env.integer(os.environ, "GROUP_WORLD_SIZE")
        _tell(f"the backend is shm, not gloo: shared memory within each of {nodes} nodes, gloo between them {_KEEP}")
        return "shm"
    if wants_shm:
        _tell(f"the backend is gloo on all nodes: {reason}")
    return asked


@functools.cache
def _objection(against: str | None, timeout: float) -> str | None:
    """One vote is enough for a process, whatever number of groups it forms one after the other."""
    return ballot.objection("shm", against, timeout)


def settle(asked: str | None, device: torch.device, world_size: int, timeout: float) -> str:
    """The backend that px.init takes for a device, or an error that says why ``asked`` cannot be had."""
    import torch.distributed as dist

    asked = choose(asked, world_size, timeout)
    if asked is None:
        return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if asked == "shm":
        if device.type != "cpu":
            raise UsageError(f"backend 'shm' is for the CPU, but this rank is on {device}; leave the backend out.")
        require_shm()
        return asked
    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if asked == "mpi" and not dist.is_mpi_available():
        raise UsageError("backend 'mpi': this torch was built without MPI; build torch with it, or use gloo.")
    if asked == "nccl" and device.type != "cuda":
        raise UsageError(f"backend 'nccl' needs a CUDA device, but this rank is on {device}; use gloo.")
    if asked in available and not available[asked]():
        raise UsageError(f"backend {asked!r}: this torch was built without it; leave it out to get one that fits.")
    if asked not in available and asked not in dist.Backend.backend_list and ":" not in asked:
        there = [name for name, is_there in available.items() if is_there()]
        raise UsageError(f"backend {asked!r} is unknown; there are shm, {', '.join(there)}.")
    return asked


def require_shm() -> None:
    """An error when shm was asked for by name and cannot be had."""
    reason = _why_not_here()
    if reason is not None:
        raise UsageError(f"backend 'shm' cannot be used: {reason}; use gloo.")


def _why_not_here() -> str | None:
    from phalanx import shm

    return shm.why_not_here()


def install() -> None:
    """Makes torch.distributed know shm, and init_process_group choose as `choose` does."""
    global _installed
    import torch.distributed as dist

    importlib.import_module("phalanx.shm")  # registers itself

    if not _installed:
        _installed = True
        dist.init_process_group = dist.distributed_c10d.init_process_group = _choosing(dist.init_process_group)


def _choosing(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        # Options are made for one backend, and a world of the script's own making may not be on one machine.
        given = inspect.signature(plain).bind_partial(backend, *args, **kwargs).arguments
        own_way = given.get("pg_options") is not None or not _is_whole_run(given)
        limit: timedelta | None = given.get("timeout")
        seconds = _TIMEOUT if limit is None else limit.total_seconds()
        with status.phase(layout.JOINING), status.waiting(layout.INIT_PROCESS_GROUP):
            plain(backend if own_way else choose(backend, timeout=seconds), *args, **kwargs)

    return init_process_group


def _is_whole_run(arguments: dict[str, Any]) -> bool:
    given = arguments.get("world_size", -1)
    return given in (-1, None) or given == env.integer(os.environ, "WORLD_SIZE")


def _has_cards() -> bool:
    import torch

    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    return torch.cuda.is_available() if accelerator is None else accelerator.is_available()


def _tell(text: str) -> None:
    """By the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        notices.give(text)
