"""The backend of a process group and the device of a rank. This is the only module that loads `shm`.

Under ``phalanx run`` a script on CPUs that asks for gloo, or for nothing, gets shm, which is many times as fast
between the processes of one machine, and between machines sends less. ``--backend as-written`` leaves the script's own
choice. Over several nodes all ranks vote, since something may be missing on one of them. Under srun and mpirun, which
set nothing of ours, `px.init` without a backend gets shm by such a vote; PHALANX_BACKEND=as-written is against it.

torch keeps the name that the script gave to such a group, since programs branch on that name: torch answers as for
gloo. `name_of` returns the real one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from phalanx import env, torch_compat
from phalanx.devices import accelerator
from phalanx.errors import UsageError
from phalanx.status import layout, notices, own_page
from phalanx.store import vote
from phalanx.torch_compat import c10d

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_TIMEOUT = 1800.0
"""Seconds that torch waits for all ranks by default."""
_KEEP = "(--backend as-written keeps gloo)"
_TO_ABORT = 2.0
"""Seconds that a rank waits for the abort of its groups."""
_FOREIGN = ("slurm", "openmpi")
"""Launchers that set neither RANK nor PHALANX_BACKEND."""
_installed = False
_elected = False
"""The world that is being formed gets shm instead of gloo, by a vote in `elected`."""


def choose(asked: str | None, world_size: int | None = None, timeout: float = _TIMEOUT) -> str | None:
    """Returns shm instead of ``asked`` if PHALANX_BACKEND is auto and all ranks can use it; else ``asked``.

    Args:
        world_size: the size of the group that is to be formed; None: that of the run.
        timeout: seconds for the ranks of other nodes to vote.
    """
    choice = env.backend_choice(os.environ)
    if choice is None or not _is_gloo(asked):
        return asked
    size, here = (env.integer(os.environ, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    wants_shm = choice == "auto" and not _has_gpus()
    if size is not None and size == here:
        return _choose_here(asked, size) if wants_shm else asked
    # Nothing known of the nodes, a world of the script's own making, or a launcher that is not ours.
    if size is None or here is None or world_size not in (None, size) or not os.environ.get("PHALANX_STORE"):
        return asked
    return _choose_together(asked, wants_shm, timeout)


def _is_gloo(asked: str | None) -> bool:
    """Torch would take gloo for every device, by any of its spellings."""
    if asked in (None, "undefined"):
        return True
    return {pair.rpartition(":")[2] for pair in asked.lower().split(",")} == {"gloo"}


def _choose_here(asked: str | None, size: int) -> str | None:
    if (reason := _why_not_here()) is not None:
        _notice(f"the backend is gloo: {reason}")
        return asked
    where = f"all {size} ranks are on this machine" if size > 1 else "there is one rank"
    _notice(f"the backend is shm, not gloo: {where} {_KEEP}")
    return "shm"


def _choose_together(asked: str | None, wants_shm: bool, timeout: float) -> str | None:
    """Chooses the same backend on all nodes. Ranks that keep gloo vote too: the others wait for them."""
    reason = _objection(_why_not_here() if wants_shm else "it keeps gloo, by --backend or for its GPU", timeout)
    if reason is None:
        nodes = env.integer(os.environ, "GROUP_WORLD_SIZE")
        _notice(f"the backend is shm, not gloo: shared memory within each of {nodes} nodes, gloo between them {_KEEP}")
        return "shm"
    if wants_shm:
        _notice(f"the backend is gloo on all nodes: {reason}")
    return asked


@functools.cache
def _objection(against: str | None, timeout: float) -> str | None:
    """The result of the vote; a process votes once, however many groups it forms."""
    return vote.objection("shm", against, timeout)


@contextlib.contextmanager
def elected(
    asked: str | None, launcher: str, store: dist.Store, rank: int, size: int, timeout: float
) -> Iterator[None]:
    """Forms a group of all ranks within: under srun and mpirun they first vote on shm, in the store they share."""
    global _elected
    if launcher not in _FOREIGN or size == 1:
        yield
        return
    from torch.distributed import PrefixStore

    against = "it asks for a backend"
    if asked is None:
        keeps = env.backend_choice(os.environ) == "as-written" or _has_gpus()
        against = "it keeps gloo, by PHALANX_BACKEND or for its GPU" if keeps else _why_not_here()
    # A rank that is against votes too: the others wait for it.
    against = f"rank {rank} (host {socket.gethostname()}): {against}" if against else None
    reason = vote.vote(PrefixStore("phalanx/vote/shm", store), rank, size, against, timeout)
    _elected = reason is None
    if _elected:
        install()
    if asked is None and rank == 0 and not _has_gpus():
        text = "shm, not gloo (PHALANX_BACKEND=as-written keeps gloo)" if _elected else f"gloo: {reason}"
        notices.give(f"the backend is {text}")
    try:
        yield
    finally:
        _elected = False


def settle(asked: str | None, device: torch.device, world_size: int, timeout: float) -> str:
    """Returns the backend that px.init asks torch for, or raises the reason why ``asked`` cannot be used."""
    import torch.distributed as dist

    if env.backend_choice(os.environ) is not None:
        install()
    if asked is None:
        default = accelerator.default_backend(device)
        if default != "gloo":
            choose(None, world_size, timeout)  # ranks without a GPU wait for the vote of this one
        return default
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
    """Raises UsageError when shm was asked for by name and cannot be used."""
    if (reason := _why_not_here()) is not None:
        raise UsageError(f"backend 'shm' cannot be used: {reason}; use gloo.")


def _why_not_here() -> str | None:
    reason = torch_compat.why_no_shm() or c10d.why_no_gloo_inside()
    if reason is not None:
        return reason
    from phalanx import shm

    return shm.why_not_here()


def name_of(group: dist.ProcessGroup | None) -> str:
    """The backend that moves the data of a group, whatever torch calls it."""
    import torch.distributed as dist

    return "shm" if is_shm(group) else dist.get_backend(group)


def is_shm(group: object) -> bool:
    """The group is one of ours. Before `shm` is loaded none can be."""
    shm = sys.modules.get("phalanx.shm")
    return shm is not None and isinstance(group, shm.ShmGroup)


def install() -> None:
    """Registers shm in torch.distributed, and applies `choose` wherever torch makes a group."""
    global _installed
    if torch_compat.why_no_shm() is None:
        importlib.import_module("phalanx.shm")  # registers itself
    if not _installed:
        _installed = True
        c10d.INIT_PROCESS_GROUP.wrap(_recording)
        if c10d.WORLD.get() is not None:  # it is where a group of shm gets the name that was asked for
            c10d.NEW_GROUP.wrap(_choosing)


def _recording(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init_process_group(backend: str | None = None, *args: object, **kwargs: object) -> None:
        if backend == "shm":
            require_shm()
        with own_page.phase(layout.JOINING), own_page.waiting(layout.INIT_PROCESS_GROUP):
            plain(backend, *args, **kwargs)

    return init_process_group


def _choosing(plain: Callable[..., tuple[Any, dist.Store]]) -> Callable[..., tuple[Any, dist.Store]]:
    """Wraps the function of torch that makes every group: the world, new_group, the dimensions of a mesh."""
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import BackendConfig

    signature, world, set_default = inspect.signature(plain), c10d.WORLD.get(), c10d.SET_DEFAULT_BACKEND.get()

    @functools.wraps(plain)
    def new_process_group_helper(*args: object, **kwargs: object) -> tuple[Any, dist.Store]:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments["backend"]
        if not _becomes_shm(asked, call.arguments):
            bound = c10d.bound_device() if call.arguments["global_ranks_in_group"] else None
            is_beside = bound is not None and not accelerator.own_backend(asked or "undefined", bound)
            with c10d.unbound_world() if is_beside else contextlib.nullcontext():
                group, store = plain(*args, **kwargs)
            if ":" in asked and _is_gloo(asked) and isinstance(group, ProcessGroup) and set_default is not None:
                # Left out by torch for "cpu:gloo" as soon as any other backend is registered, such as ours.
                set_default(group, ProcessGroup.BackendType.GLOO)
            return group, store
        before = len(world.pg_map)
        call.arguments["backend"] = "shm"
        group, store = plain(*call.args, **call.kwargs)
        if len(world.pg_map) > before:  # not one that was there already, nor one without this rank
            group.substitutes_gloo = True
            world.pg_map[group] = asked, store
            world.pg_backend_config[group] = str(BackendConfig(asked))
        return group, store

    return new_process_group_helper


def _becomes_shm(asked: str | None, arguments: Mapping[str, Any]) -> bool:
    """The group is to be shm instead of ``asked``. ``arguments``: of torch's _new_process_group_helper."""
    import torch.distributed as dist

    if not _is_gloo(asked) or arguments.get("backend_options") is not None:  # options are made for one backend
        return False
    if arguments["global_ranks_in_group"]:
        return getattr(dist.group.WORLD, "substitutes_gloo", False)  # as the world, so that all ranks agree
    if _elected:
        return True
    size, limit = arguments["group_size"], arguments.get("timeout")
    if size != env.integer(os.environ, "WORLD_SIZE"):  # a world of the script's own making may not be on one machine
        return False
    return choose(asked, size, _TIMEOUT if limit is None else limit.total_seconds()) == "shm"


def abort(device: torch.device, seconds: float = _TO_ABORT) -> None:
    """Leaves all groups without the other ranks; in a thread, because it may wait for a device for a long time."""

    def run() -> None:
        call = c10d.ABORT.get()
        with contextlib.suppress(Exception):  # the reason for leaving is the one to be told
            if call is not None:
                accelerator.module(device).set_device(device)  # a new thread has 0, and would make a context there
                call()

    thread = threading.Thread(target=run, name="phalanx-abort", daemon=True)
    thread.start()
    thread.join(seconds)


def _has_gpus() -> bool:
    return accelerator.kind() is not None


def _notice(text: str) -> None:
    """Prints a line on the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        notices.give(text)
