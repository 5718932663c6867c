"""Groups of gloo that no script has asked for: their address and their timeout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from phalanx.torch_compat import OLDEST_FOR_SHM, quiet_gloo
from phalanx.torch_compat.c10d import REGISTER_BACKEND, SET_DEFAULT_BACKEND
from phalanx.torch_compat.names import Name

_LOST = "The backend shm: all groups are of gloo."
OPTIONS = Name(
    "torch.distributed:ProcessGroupGloo._Options",
    "The gloo inside of a group of shm, and between nodes: its address, and its timeout while it connects.",
    _LOST,
    since=OLDEST_FOR_SHM,
)
OPTIONS_TIMEOUT = Name(
    "torch.distributed:ProcessGroupGloo._Options._timeout", "The timeout in them.", _LOST, since=OLDEST_FOR_SHM
)
OPTIONS_DEVICES = Name(
    "torch.distributed:ProcessGroupGloo._Options._devices", "The address in them.", _LOST, since=OLDEST_FOR_SHM
)
SET_DEFAULT_TIMEOUT = Name(
    "torch.distributed:ProcessGroupGloo._set_default_timeout",
    "After the links between nodes are made, shm itself watches the time: it can say which rank is late.",
    "A timeout between nodes is gloo's, and names no rank.",
    since=OLDEST_FOR_SHM,
)


def why_not_inside() -> str | None:
    """Why a group of shm cannot have a gloo inside; None when it can."""
    names = (OPTIONS, OPTIONS_TIMEOUT, OPTIONS_DEVICES, REGISTER_BACKEND, SET_DEFAULT_BACKEND)
    missing = next((name for name in names if name.get() is None), None)
    return None if missing is None else f"this torch has no {missing}"


def new_group(store: Any, rank: int, size: int, timeout: timedelta, address: str, lazy: bool = False) -> Any:
    """``lazy``: two ranks connect when they first talk to each other, so that it costs nothing until then."""
    import torch.distributed as dist

    options = OPTIONS.get()()
    setattr(options, OPTIONS_TIMEOUT.attribute, timeout)
    setattr(options, OPTIONS_DEVICES.attribute, [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=lazy)])
    with quiet_gloo():
        return dist.ProcessGroupGloo(store, rank, size, options)


def set_timeout(group: Any, timeout: timedelta) -> None:
    call = SET_DEFAULT_TIMEOUT.get()
    if call is not None:
        call(group, timeout)
