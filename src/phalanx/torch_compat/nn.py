"""torch.nn, torch.autograd and torch.save: modules and their replicas, DDP, and the phases of a training step."""

from __future__ import annotations

import sys
from collections.abc import Callable

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
PARAMETERS = Name("torch.nn:Module._parameters", "Also finds entries that are None.", _LOST)
BUFFERS = Name("torch.nn:Module._buffers", "Also finds entries that are None.", _LOST)
CHILDREN = Name("torch.nn:Module._modules", "Also finds modules that are None or have two names.", _LOST)
WRAPPER = Name(
    "torch._utils:ExceptionWrapper",
    "An exception of a replica is raised with its number, as torch's DataParallel does.",
    "The exception of a replica is raised as it is, without the replica's number.",
)
DDP_INIT = Replaced(
    "torch.nn.parallel:DistributedDataParallel.__init__",
    "A model that outlives its group on gloo does not hang, and the recorder sees the end of own work in backward.",
    "A DDP model that outlives its group on gloo may hang, and no straggler is named under DDP on gloo.",
)
DDP_BROADCAST = Replaced(
    "torch.distributed:_broadcast_coalesced",
    "The recorder sees that DDP waits for the buffers of rank 0.",
    "Waiting for DDP's buffers counts as own work.",
)
DDP_LOGGING_DATA = Name(
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    "The number of parameters of DDP, to translate the numbers in its errors to names.",
    "An error about missing gradients has DDP's numbers and no names.",
)
BACKWARD = Replaced(
    "torch.autograd:backward",
    "The recorder notes the phase backward; shm's errors keep their type where DDP's C++ makes RuntimeErrors of them.",
    "The phase backward in the status page, and PeerLost out of backward.",
)
NEW_OPTIMIZER = Replaced(
    "torch.optim:Optimizer.__init__",
    "A rank that has an optimizer is about to train: a request to stop waits for its first step.",
    "A request to stop before the first step reaches the ranks at different moments.",
)
ENGINE = Name(
    "torch.autograd:Variable._execution_engine",
    "Calls the recorder when a rank's own work in backward is done, just before DDP waits for the others.",
    "Own work in backward is not distinguished from waiting, so no straggler is named under DDP on gloo.",
)
SAVE = Replaced(
    "torch:save",
    "The recorder notes the phase checkpoint.",
    "The phase checkpoint of scripts that call torch.save.",
    also=("torch.serialization",),
)


def can_replicate() -> bool:
    from torch import nn

    own = [name.needed_of(nn.Module()) for name in (PARAMETERS, BUFFERS, CHILDREN)]
    return REPLICATE.get() is not None and None not in own


def caught(where: str) -> Callable[[], None]:
    """Returns a function that raises the exception that is being handled, also in another thread."""
    wrapper, error = WRAPPER.get(), sys.exception()
    assert error is not None, "called outside of an except clause"

    def reraise() -> None:
        raise error

    return reraise if wrapper is None else wrapper(where=where).reraise
