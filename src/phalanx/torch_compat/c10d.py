"""torch.distributed's process groups and its rendezvous."""

from __future__ import annotations

from typing import Any

from phalanx.torch_compat import OLDEST_FOR_SHM
from phalanx.torch_compat.names import Name, Replaced

_C10D = "torch.distributed.distributed_c10d"
_RENDEZVOUS = "torch.distributed.rendezvous"

INIT_PROCESS_GROUP = Replaced(
    "torch.distributed:init_process_group",
    "The recorder notes that a rank is joining; shm by name is refused in one sentence where it cannot be had.",
    "A rank that waits for others in init_process_group is not shown as joining.",
    also=(_C10D,),
)
NEW_GROUP = Replaced(
    f"{_C10D}:_new_process_group_helper",
    "Every group comes from it: a group of gloo on CPUs becomes one of shm, and the recorder begins.",
    "Groups that ask for gloo stay on gloo.",
)
WORLD = Name(
    f"{_C10D}:_world",
    "torch's register of groups: their names and ranks, the backend they are called by, and the world's store.",
    "Groups that ask for gloo stay on gloo, collectives in reports have no group, and px functions need px.init.",
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
    "The backend shm: all groups are of gloo.",
)
REGISTER_BACKEND = Name(
    "torch.distributed:ProcessGroup._register_backend",
    "The gloo inside of a group of shm does what shm itself cannot.",
    "The backend shm: all groups are of gloo.",
    since=OLDEST_FOR_SHM,
)
GET_BACKEND = Name(
    "torch.distributed:ProcessGroup._get_backend",
    "Whether a group that is destroyed already was of gloo.",
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
    "torch's own asks for the name gloo; a group of shm has one too.",
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
    "As send.",
    "A rank that waits in recv is not shown as such on gloo.",
    also=(_C10D,),
)
WAIT = Replaced(
    "torch.distributed:Work.wait",
    "The recorder tells waiting for others from own work.",
    "Waiting for an asynchronous collective counts as own work.",
)
SOURCE_RANK = Name(
    "torch.distributed:Work._source_rank",
    "Which rank a message from any rank came from.",
    "On several nodes, a message from any rank has no known sender on shm.",
    since=OLDEST_FOR_SHM,
)
STORE_INIT = Replaced(
    "torch.distributed:TCPStore.__init__",
    "The recorder notes which store a rank connects to.",
    "A rank that waits for a store that nobody serves is not explained.",
)
CREATE_STORE = Replaced(
    f"{_RENDEZVOUS}:_create_c10d_store",
    "An address that a script itself has chosen becomes a part of the launcher's store.",
    "Scripts with a tcp:// address or a MASTER_PORT of their own wait for a store that nobody serves.",
)
USE_AGENT_STORE = Replaced(
    f"{_RENDEZVOUS}:_torchelastic_use_agent_store",
    "Worlds of other ranks than those of the run are served by their rank 0.",
    "Scripts with a tcp:// address or a MASTER_PORT of their own wait for a store that nobody serves.",
)


def uses_gloo(group: Any) -> bool:
    """Whether one of a group's backends is gloo; the group may be destroyed. False where torch does not say."""
    import torch.distributed as dist

    backend, devices = GET_BACKEND.of(group), DEVICE_TYPES.of(group, ())
    return backend is not None and any(isinstance(backend(device), dist.ProcessGroupGloo) for device in devices)


def add_default_backend(group: Any, device: Any, kind: Any, backend: Any) -> None:
    REGISTER_BACKEND.get()(group, device, kind, backend)
    SET_DEFAULT_BACKEND.get()(group, kind)


def source_rank(work: Any) -> int:
    """The sender of a message that was received from any rank; -1 where torch does not say."""
    find = SOURCE_RANK.get()
    return -1 if find is None else find(work)


def default_store() -> Any:
    """The store of the group of all ranks; None where torch does not say."""
    import torch.distributed as dist

    world = WORLD.get()
    return None if world is None else world.pg_map[dist.group.WORLD][1]
