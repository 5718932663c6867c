"""torch.distributed: its process groups, gloo, and both kinds of rendezvous."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.torch_compat import OLDEST_FOR_SHM, quiet_gloo
from phalanx.torch_compat.names import Name, Replaced

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Gloo = Any
"""A ProcessGroupGloo: torch's stubs do not have its collectives."""

_C10D = "torch.distributed.distributed_c10d"
_RENDEZVOUS = "torch.distributed.rendezvous"
_NO_SHM = "The backend shm: all groups are of gloo."

INIT_PROCESS_GROUP = Replaced(
    "torch.distributed:init_process_group",
    "The recorder notes that a rank is joining; backend='shm' is refused in one sentence where it is not available.",
    "A rank that waits for others in init_process_group is not shown as joining.",
    also=(_C10D,),
)
NEW_GROUP = Replaced(
    f"{_C10D}:_new_process_group_helper",
    "It creates every group: on CPUs a gloo group becomes a shm group, and the recorder begins.",
    "Groups that ask for gloo stay on gloo.",
)
WORLD = Name(
    f"{_C10D}:_world",
    "torch's register of groups: their names and ranks, the backend they are called by, and the world's store.",
    "Groups that ask for gloo stay on gloo, collectives in reports have no group, and px functions need px.init.",
)
SEQUENCE_NUMBER = Name(
    "torch.distributed:ProcessGroup._get_sequence_number_for_group",
    "How many collectives the world has called: the clock by which all ranks stop at the same step.",
    "Ranks stop at the same optimizer step; a rank with more optimizers than the others stops at another step.",
)
SET_TIMEOUT = Replaced(
    f"{_C10D}:_set_pg_timeout",
    "A timeout that is set later reaches a group of shm too.",
    "Groups of shm keep the timeout that they were made with.",
    since=OLDEST_FOR_SHM,
)
SET_DEFAULT_BACKEND = Name(
    "torch.distributed:ProcessGroup._set_default_backend",
    "The gloo inside of a group of shm; and the one of 'cpu:gloo', left out once another backend is registered.",
    _NO_SHM,
)
REGISTER_BACKEND = Name(
    "torch.distributed:ProcessGroup._register_backend",
    "The gloo inside of a group of shm does what shm itself cannot.",
    _NO_SHM,
    since=OLDEST_FOR_SHM,
)
GET_BACKEND = Name(
    "torch.distributed:ProcessGroup._get_backend",
    "Shows whether a group that is already destroyed was a gloo group.",
    "A DDP model that outlives its group on gloo may hang when the interpreter ends.",
)
DEVICE_TYPES = Name(
    "torch.distributed:ProcessGroup._device_types",
    "The devices by which the backends of a group are found.",
    "A DDP model that outlives its group on gloo may hang when the interpreter ends.",
)
ABORT = Name(
    f"{_C10D}:_abort_process_group",
    "After an exception on a GPU, leaves the group without waiting for kernels that never finish.",
    "After an exception on a GPU the group is left to the end of the process.",
)
MONITORED_BARRIER = Replaced(
    "torch.distributed:monitored_barrier",
    "torch's own requires the name gloo; this makes it work for a shm group.",
    "monitored_barrier on a group of shm.",
    also=(_C10D,),
    since=OLDEST_FOR_SHM,
)
SEND = Replaced(
    "torch.distributed:send",
    "The recorder notes messages of gloo, which torch's flight recorder does not see.",
    "A rank that waits in send is not shown as such on gloo.",
    also=(_C10D,),
)
RECV = Replaced(
    "torch.distributed:recv",
    "The same for recv.",
    "A rank that waits in recv is not shown as such on gloo.",
    also=(_C10D,),
)
WAIT = Replaced(
    "torch.distributed:Work.wait",
    "The recorder distinguishes waiting for others from own work.",
    "Waiting for an asynchronous collective counts as own work.",
)
SOURCE_RANK = Name(
    "torch.distributed:Work._source_rank",
    "The sender of a message that was received from any rank.",
    "On several nodes, a message from any rank has no known sender on shm.",
    since=OLDEST_FOR_SHM,
)
STORE_INIT = Replaced(
    "torch.distributed:TCPStore.__init__",
    "The recorder notes which store a rank connects to.",
    "A rank that waits for a store that no process serves is not explained.",
)
CREATE_STORE = Replaced(
    f"{_RENDEZVOUS}:_create_c10d_store",
    "An address that the script has chosen is served by the launcher's store.",
    "Scripts with a tcp:// address or a MASTER_PORT of their own wait for a store that no process serves.",
)
USE_AGENT_STORE = Replaced(
    f"{_RENDEZVOUS}:_torchelastic_use_agent_store",
    "A world that is not that of the run is served by its rank 0.",
    "Scripts with a tcp:// address or a MASTER_PORT of their own wait for a store that no process serves.",
)
GLOO_OPTIONS = Name(
    "torch.distributed:ProcessGroupGloo._Options",
    "The gloo inside of a group of shm, and between nodes: its address, and its timeout while it connects.",
    _NO_SHM,
    since=OLDEST_FOR_SHM,
)
GLOO_OPTIONS_TIMEOUT = Name(
    "torch.distributed:ProcessGroupGloo._Options._timeout",
    "The timeout in these options.",
    _NO_SHM,
    since=OLDEST_FOR_SHM,
)
GLOO_OPTIONS_DEVICES = Name(
    "torch.distributed:ProcessGroupGloo._Options._devices",
    "The address in these options.",
    _NO_SHM,
    since=OLDEST_FOR_SHM,
)
GLOO_SET_TIMEOUT = Name(
    "torch.distributed:ProcessGroupGloo._set_default_timeout",
    "Once the nodes are connected, shm itself measures the timeout, because it can name the rank that is late.",
    "A timeout between nodes is gloo's, and names no rank.",
    since=OLDEST_FOR_SHM,
)
_DYNAMIC = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_NOT_ELASTIC = "Runs whose number of nodes may change (--nnodes 1:4) are refused; a fixed number works."
ELASTIC_STATE = Name(
    f"{_DYNAMIC}:_RendezvousState", "The state of the rendezvous, which phalanx keeps in the store.", _NOT_ELASTIC
)
ELASTIC_NODE = Name(f"{_DYNAMIC}:_NodeDesc", "A node in that state.", _NOT_ELASTIC)
find_sequence_number = functools.cache(SEQUENCE_NUMBER.get)


def _backends(group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the backends of a group, also of a destroyed one. None if torch does not tell."""
    backend, devices = GET_BACKEND.of(group), DEVICE_TYPES.of(group, ())
    return [] if backend is None else [backend(device) for device in devices]


def nccl_number(group: dist.ProcessGroup) -> int | None:
    """Returns the number of a group in nccl's flight recorder; None if it does not use nccl, or torch does not tell."""
    return next((each.uid for each in _backends(group) if hasattr(each, "uid")), None)


def uses_gloo(group: dist.ProcessGroup | None) -> bool:
    import torch.distributed as dist

    return any(isinstance(each, dist.ProcessGroupGloo) for each in _backends(group))


def add_default_backend(
    group: dist.ProcessGroup, device: torch.device, kind: dist.ProcessGroup.BackendType, backend: Gloo
) -> None:
    REGISTER_BACKEND.get()(group, device, kind, backend)
    SET_DEFAULT_BACKEND.get()(group, kind)


def source_rank(work: dist.Work) -> int:
    """Returns the sender of a message that was received from any rank; -1 if torch does not tell."""
    find = SOURCE_RANK.get()
    return -1 if find is None else find(work)


def default_store() -> dist.Store | None:
    """Returns the store of the group of all ranks; None if torch does not tell."""
    import torch.distributed as dist

    world = WORLD.get()
    return None if world is None else world.pg_map[dist.group.WORLD][1]


def collectives_of(group: dist.ProcessGroup | None) -> int:
    """Returns how many collectives a group has called; 0 where nobody counts them."""
    own = getattr(group, "collectives_called", None)
    if own is not None:
        return own
    count = find_sequence_number()
    try:
        return 0 if group is None or count is None else count(group)
    except RuntimeError:  # a backend of somebody else's does not count
        return 0


def bound_device() -> torch.device | None:
    """Returns the device that the world is bound to; None for none, or when there is no world."""
    import torch.distributed as dist

    return getattr(dist.group.WORLD, "bound_device_id", None)


@contextlib.contextmanager
def unbound_world() -> Iterator[None]:
    """The world is bound to no device while a group of some ranks is made beside its accelerator's backend.

    Otherwise torch lets the ranks outside of that group split the world's communicator, and those inside do not.
    """
    import torch.distributed as dist

    world, bound = dist.group.WORLD, bound_device()
    assert world is not None
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def why_no_gloo_inside() -> str | None:
    """Returns why a group of shm cannot have a gloo inside; None when it can."""
    names = (GLOO_OPTIONS, GLOO_OPTIONS_TIMEOUT, GLOO_OPTIONS_DEVICES, REGISTER_BACKEND, SET_DEFAULT_BACKEND)
    missing = next((name for name in names if name.get() is None), None)
    return None if missing is None else f"this torch has no {missing}"


def new_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, address: str, lazy: bool = False) -> Gloo:
    """Makes a gloo group. ``lazy``: two ranks connect at their first message, so it costs nothing until then."""
    import torch.distributed as dist

    options, device = GLOO_OPTIONS.get()(), dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=lazy)
    setattr(options, GLOO_OPTIONS_TIMEOUT.attribute, timeout)
    setattr(options, GLOO_OPTIONS_DEVICES.attribute, [device])
    with quiet_gloo():
        return dist.ProcessGroupGloo(store, rank, size, options)


def set_gloo_timeout(group: Gloo, timeout: timedelta) -> None:
    call = GLOO_SET_TIMEOUT.get()
    if call is not None:
        call(group, timeout)


def why_not_elastic() -> str | None:
    """Returns why the number of nodes cannot change with this torch; None when it can."""
    missing = [str(name) for name in (ELASTIC_STATE, ELASTIC_NODE) if name.get() is None]
    return f"this torch has no {' and no '.join(missing)}" if missing else None
