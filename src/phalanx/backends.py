"""JOIN: which backend a process group gets. This is the only module that loads `shm`.

Under ``phalanx run`` a script on CPUs that asks for gloo, or for nothing, gets shm, which is many times as fast
between the processes of one machine. ``--backend as-written`` leaves the script's own choice.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from phalanx import env
from phalanx.errors import UsageError

_INSTEAD_OF = (None, "gloo", "cpu:gloo")
_told: set[str] = set()
_installed = False


def choose(asked: str | None) -> str | None:
    """The backend instead of ``asked``; ``asked`` itself, unless PHALANX_BACKEND is auto and shm can do it here."""
    if asked not in _INSTEAD_OF or env.backend_choice(os.environ) != "auto" or _has_cards():
        return asked
    world_size = env.integer(os.environ, "WORLD_SIZE")
    if world_size is None or world_size != env.integer(os.environ, "LOCAL_WORLD_SIZE"):
        return asked  # several nodes, or nothing known of them
    from phalanx import shm

    reason = shm.why_not_here()
    if reason is not None:
        _tell(f"the backend is gloo: {reason}")
        return asked
    where = f"all {world_size} ranks are on this machine" if world_size > 1 else "there is one rank"
    _tell(f"the backend is shm, not gloo: {where} (--backend as-written keeps gloo)")
    return "shm"


def require_shm(situation_nodes: int) -> None:
    """An error when shm was asked for by name and cannot be had."""
    from phalanx import shm

    if situation_nodes > 1:
        raise UsageError(f"backend 'shm' is for one node, but this job has {situation_nodes}; use gloo between nodes.")
    reason = shm.why_not_here()
    if reason is not None:
        raise UsageError(f"backend 'shm' cannot be used: {reason}; use gloo.")


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
        plain(backend if own_way else choose(backend), *args, **kwargs)

    return init_process_group


def _is_whole_run(arguments: dict[str, Any]) -> bool:
    given = arguments.get("world_size", -1)
    return given in (-1, None) or given == env.integer(os.environ, "WORLD_SIZE")


def _has_cards() -> bool:
    import torch

    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    return torch.cuda.is_available() if accelerator is None else accelerator.is_available()


def _tell(text: str) -> None:
    """Once, and by the first rank alone."""
    if text not in _told and os.environ.get("RANK", "0") == "0":
        _told.add(text)
        print(f"phalanx: {text}", file=sys.stderr, flush=True)
