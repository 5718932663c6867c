"""torch.nn.parallel.DistributedDataParallel."""

from __future__ import annotations

from phalanx.torch_compat.names import Name, Replaced

INIT = Replaced(
    "torch.nn.parallel:DistributedDataParallel.__init__",
    "A model that outlives its group on gloo does not hang, and the recorder sees the end of own work in backward.",
    "A DDP model that outlives its group on gloo may hang, and no straggler is named under DDP on gloo.",
)
BROADCAST = Replaced(
    "torch.distributed:_broadcast_coalesced",
    "The recorder sees that DDP waits for the buffers of rank 0.",
    "Waiting for DDP's buffers counts as own work.",
)
LOGGING_DATA = Name(
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    "How many parameters DDP has numbered: by that their numbers in its errors become names.",
    "An error about missing gradients has DDP's numbers and no names.",
)
