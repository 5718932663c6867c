"""torch.nn.Module: its state dict, and copies of it for several replicas in one process."""

from __future__ import annotations

import sys
from typing import Any

from phalanx.torch_compat.names import Name, Replaced

LOAD_STATE_DICT = Replaced(
    "torch.nn:Module.load_state_dict",
    "While a checkpoint is copied in the background, loading a state dict waits for the copy.",
    "A state that is loaded while a checkpoint is being copied may get into that checkpoint.",
)
METADATA = Name(
    "torch.nn:Module.state_dict()._metadata",
    "The versions of the modules, which torch keeps beside the tensors of a state dict.",
    "Checkpoints do not keep them, and older ones are loaded as if they were of this version.",
)
_LOST = "mode='dp' on CPUs runs one replica."
REPLICATE = Name("torch.nn:Module._replicate_for_data_parallel", "A copy of one module, without its tensors.", _LOST)
PARAMETERS = Name("torch.nn:Module._parameters", "Also those that are None.", _LOST)
BUFFERS = Name("torch.nn:Module._buffers", "Also those that are None.", _LOST)
CHILDREN = Name("torch.nn:Module._modules", "Also those that are None or have two names.", _LOST)
WRAPPER = Name(
    "torch._utils:ExceptionWrapper",
    "An exception of a replica is raised with its number, as torch's DataParallel does.",
    "The exception of a replica is raised as it is, without the replica's number.",
)


def can_replicate() -> bool:
    from torch import nn

    own = [name.needed_of(nn.Module()) for name in (PARAMETERS, BUFFERS, CHILDREN)]
    return REPLICATE.get() is not None and None not in own


def caught(where: str) -> Any:
    """The exception that is being handled, to be raised by `reraise` in another thread."""
    wrapper = WRAPPER.get()
    return sys.exception() if wrapper is None else wrapper(where=where)


def reraise(found: Any) -> None:
    if isinstance(found, BaseException):
        raise found
    found.reraise()
