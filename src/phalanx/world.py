"""`init` joins this process to the world of all ranks; `World` holds its rank and the others'."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from phalanx import argparser, backends, cluster, torch_compat
from phalanx.cluster import Situation
from phalanx.cluster.situation import on_nodes, override
from phalanx.devices import accelerator
from phalanx.errors import UsageError
from phalanx.status import notices
from phalanx.store.join import JOIN_TIMEOUT, Claim, Meeting, join, leave_store
from phalanx.torch_compat import c10d

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_BOUND_TO_DEVICE = ("nccl", "xccl")
"""The backends that connect at once if they are told the device."""


@dataclass(frozen=True)
class World:
    """This process's rank among all processes. A context manager: its end leaves the process group."""

    rank: int
    """Number of this process among all, from 0."""
    size: int
    """Number of processes in all (world_size)."""
    local_rank: int
    """Number of this process on its node; also the number of its GPU."""
    local_size: int
    """Number of processes on this node (nproc_per_node)."""
    node: int
    """Number of this node (node_rank)."""
    nodes: int
    """Number of nodes (nnodes)."""
    device: torch.device
    backend: str
    master: str
    """The address where the ranks met: the master's ``address:port``, a file, or ``none`` for a world of one."""
    launcher: str
    """The launcher that started this process: torchrun (and phalanx run), slurm, openmpi, single."""
    _meeting: Meeting | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Rank 0 is the one that prints and saves."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """torch's process group of all ranks; None when there is none."""
        import torch.distributed as dist

        return dist.group.WORLD

    @property
    def store(self) -> Any:  # a dist.Store for every script that has joined, which need not check for None
        """The key-value store that all ranks share; None before `init`."""
        return self._meeting.store if self._meeting else None

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The host and pid of each rank."""
        return self._meeting.claims if self._meeting else ()

    def close(self) -> None:
        """Leaves the process group; harmless when it has been left already."""
        _leave(self, in_order=True)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and accelerator.serves(self.device):
            notices.leave_with(error)
        _leave(self, in_order=kind is None)


_current: World | None = None
_before_leaving: list[Callable[[], None]] = []
"""Calls that finish work before the world is left, while the other ranks are still there."""
_seed_to_diverge: int | None = None
"""The seed of `init`, until `diverge` is called."""


def init(
    backend: str | None = None,
    init_method: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    store: dist.Store | None = None,
    timeout: float | timedelta | None = None,
    device: str | torch.device | None = None,
    seed: int | None = None,
) -> World:
    """Joins the process group and returns the world of all ranks.

    Everything may be left out: the values come from whatever started the process (phalanx run, torchrun, srun,
    mpirun), and from nothing at all for a world of one, so that ``python train.py`` works too.

    Args:
        backend: ``nccl``, ``gloo``, ``shm``, ``mpi`` or another that torch knows; by default what fits the device.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        store: a torch store that all ranks share, instead of an init_method.
        timeout: seconds for reaching the master, for all ranks to come, and for each collective. The defaults are
            300 s, 300 s and torch's own 30 minutes.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``xpu``, ``npu``, ``mps``; by default the GPU of this local rank if
            there is one. It becomes torch's current device.
        seed: for python, numpy and torch. All ranks draw the same, so that files are split and weights are made alike,
            until `px.data_parallel` or `px.track` is called; from then on each draws its own, for augmentation,
            dropout and the workers of a DataLoader.
    """
    global _current, _seed_to_diverge
    import torch.distributed as dist

    if dist.is_initialized():
        raise UsageError("the process group exists already; call px.init() once, or leave its `with` block first.")
    limit = argparser.seconds("timeout", timeout)
    seed = seed if seed is None else argparser.whole_number("seed", seed, -(2**63), 2**64 - 1)  # torch's bounds
    for name, value in (("backend", backend), ("init_method", init_method)):
        if not isinstance(value, str | None):
            raise UsageError(f"{name} is {argparser.shown(value)}; give a name, or leave it out.")
    if not isinstance(store, dist.Store | None):
        raise UsageError(f"store is {argparser.shown(store)}; give a torch.distributed.Store, or leave it out.")
    situation = override(cluster.find(os.environ), rank, world_size)
    met = None if situation.local_is_known else join(situation, init_method, store, limit)
    if met is not None:  # before a rank takes the GPU of its local rank
        situation = on_nodes(situation, [f"{claim.host} {claim.machine}" for claim in met[0].claims])
    asked = None if device is None else argparser.device(device)
    place = accelerator.choose(asked, situation.local_rank, situation.world_size)
    name = backends.settle(backend, place, situation.world_size, limit or JOIN_TIMEOUT)
    own = accelerator.own_backend(name, place)
    # Ranks on the CPU may share it, as may those whose collectives are gloo's.
    note = accelerator.identity(place) if own and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1" else ""
    meeting, where = met or join(situation, init_method, store, limit, note)
    options: dict[str, Any] = {"timeout": timedelta(seconds=limit)} if limit else {}
    if own in _BOUND_TO_DEVICE:
        options["device_id"] = place
        backends.install()  # what a bound world needs for its groups
    number, size, voters = situation.rank, situation.world_size, (backend, situation.kind, meeting.store)
    try:
        with backends.elected(*voters, number, size, limit or JOIN_TIMEOUT), torch_compat.quiet_gloo():
            dist.init_process_group(name, store=meeting.store, rank=number, world_size=size, **options)
        if seed is not None:
            seed_all(seed)
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    _current = _world(situation, place, where, meeting)
    _seed_to_diverge = seed
    return _current


def _world(s: Situation, device: torch.device, where: str, meeting: Meeting | None) -> World:
    import torch.distributed as dist

    backend = backends.name_of(dist.group.WORLD)
    return World(
        s.rank, s.world_size, s.local_rank, s.local_size, s.node, s.nodes, device, backend, where, s.kind, meeting
    )


def seed_all(seed: int) -> None:
    """Seeds python, numpy and torch."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mixed_seed(seed: int, rank: int) -> int:
    """A seed for a rank. Unlike ``seed + rank``, no rank of a run with the next seed has it too."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=7).digest(), "little")


def diverge() -> None:
    """Makes the random numbers of the ranks differ, if `init` was given a seed. Only the first call counts."""
    global _seed_to_diverge
    if _current is not None and _seed_to_diverge is not None:
        seed_all(mixed_seed(_seed_to_diverge, _current.rank))
        _seed_to_diverge = None


def before_leaving(finish: Callable[[], None]) -> None:
    """Registers a call for the end of the world that `init` has joined; it is left out after an exception."""
    if _current is not None:
        _before_leaving.append(finish)


def forget(finish: Callable[[], None]) -> None:
    """Undoes `before_leaving`."""
    if finish in _before_leaving:
        _before_leaving.remove(finish)


def current() -> World:
    """The world that was joined, by `init` or by torch.distributed itself; without either, by the launcher's values."""
    import torch.distributed as dist

    if _current is not None:
        return _current
    s = cluster.find(os.environ)
    device = accelerator.current(c10d.bound_device())
    if dist.is_initialized():
        s = override(s, dist.get_rank(), dist.get_world_size())
        shared = c10d.default_store()
        if shared is None and s.world_size > 1:
            raise UsageError("this torch does not expose the store of its process group; call px.init() first.")
        return _world(s, device, "", Meeting(shared, (), hosted_here=False) if shared is not None else None)
    if s.world_size > 1:
        raise UsageError(f"this is rank {s.rank} of {s.world_size}, but it has not joined yet; call px.init() first.")
    return World(0, 1, 0, 1, 0, 1, device, "none", "none", s.kind)


def _leave(world: World, *, in_order: bool) -> None:
    """Leaves the group. After an exception it waits for no rank: the closed connections inform the others."""
    global _current
    if _current is not world:
        return
    calls = [*_before_leaving]
    _before_leaving.clear()
    try:
        for finish in calls if in_order else ():
            finish()
    except BaseException:
        in_order = False
        raise
    finally:
        _current = None
        _destroy(world, in_order=in_order)


def _destroy(world: World, *, in_order: bool) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if not in_order and accelerator.serves(world.device):
        backends.abort(world.device)  # an orderly end would wait for kernels that never finish
        return
    meeting = world._meeting
    if in_order and meeting is not None and world.size > 1:
        leave_store(meeting, world.size)
    dist.destroy_process_group()
