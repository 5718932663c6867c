"""Keeps a DDP model that outlives its process group from a deadlock inside torch.

DDP's Reducer holds the group too. If it is the last one to do so, the group's destructor joins gloo's threads while
the GIL is held, and one of them may just be waiting for the GIL, to release what the last backward has left with it.
Python's own reference to a group releases the GIL first, so that one has to be the last.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.torch_compat import c10d
from phalanx.torch_compat.nn import DDP_INIT

_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def install() -> None:
    if dist.is_available() and dist.is_gloo_available():
        DDP_INIT.wrap(_with_group_last)
        for name in (c10d.GET_BACKEND, c10d.DEVICE_TYPES):
            name.get()  # what `_keep_groups` needs: if it is not there, that is noted now


def _with_group_last(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        # A dict releases its values in their order: this one after the Reducer.
        attributes: dict[str, Any] = vars(self)
        attributes["process_group"] = attributes.pop("process_group")
        if not _models:
            atexit.register(_keep_groups)
        _models.add(self)

    return init


def _keep_groups() -> None:
    """While the interpreter ends, no thread gets the GIL any more: what is left then is left to the kernel."""
    for model in _models:
        if c10d.uses_gloo(model.process_group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(model.process_group))
