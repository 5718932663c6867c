"""Notes where each DDP model begins to wait for other ranks, and lets it end without a deadlock.

DDP waits in a callback of the autograd engine, at the end of backward. The engine calls callbacks in the order in which
they were queued, and DDP queues its own when the last parameter has its gradient. So a callback that is queued when any
parameter gets its gradient is called when all own work is done, and just before DDP begins to wait.

DDP's Reducer holds the process group too. If it is the last one to do so, the group's destructor joins gloo's threads
while the GIL is held, and one of them may just be waiting for the GIL, to release what the last backward has left with
it. Python's own reference to a group releases the GIL first, so that one has to be the last.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from phalanx.recorder import device_clock
from phalanx.recorder.around import never_raises
from phalanx.status import layout, own_page
from phalanx.torch_compat import c10d
from phalanx.torch_compat.nn import DDP_INIT, ENGINE

P = ParamSpec("P")
_engine: Any = None
"""The autograd engine, which has no public type."""
_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def install() -> None:
    global _engine
    if not dist.is_available():
        return
    _engine = ENGINE.get()
    DDP_INIT.wrap(_with_additions)
    if dist.is_gloo_available():
        for name in (c10d.GET_BACKEND, c10d.DEVICE_TYPES):
            name.get()  # if `_keep_groups` lacks one of these, that is noted now


def _with_additions(
    plain: Callable[Concatenate[DistributedDataParallel, P], None],
) -> Callable[Concatenate[DistributedDataParallel, P], None]:
    @functools.wraps(plain)
    def init(self: DistributedDataParallel, *args: P.args, **kwargs: P.kwargs) -> None:
        plain(self, *args, **kwargs)
        if _engine is not None and own_page.current() is not None:
            # Everything else is computed from the first parameter, so no backward leaves it out.
            first = next((parameter for parameter in self.module.parameters() if parameter.requires_grad), None)
            if first is not None:
                first.register_hook(_queue_block)
        if dist.is_gloo_available():
            _release_group_last(self)

    return init


@unserializable_hook  # without it, saving a whole model would warn of the hook
@never_raises
def _queue_block(_: Tensor) -> None:
    page = None if torch.compiler.is_compiling() else own_page.current()
    if page is not None and page.phase == layout.BACKWARD:
        _engine.queue_callback(page.block)
        if device_clock.clock is not None:
            device_clock.clock.own_work_ends()


def _release_group_last(model: DistributedDataParallel) -> None:
    # A dict releases its values in their order: this one after the Reducer.
    vars(model)["process_group"] = vars(model).pop("process_group")
    if not _models:
        atexit.register(_keep_groups)
    _models.add(model)


def _keep_groups() -> None:
    """Leaves groups to the kernel: while the interpreter ends, no thread gets the GIL any more."""
    for model in _models:
        if c10d.uses_gloo(model.process_group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(model.process_group))
