"""torch.autograd, and what every script saves with: where a step's phases begin and end."""

from __future__ import annotations

from phalanx.torch_compat.names import Name, Replaced

BACKWARD = Replaced(
    "torch.autograd:backward",
    "The recorder notes the phase backward; shm's errors keep their type where DDP's C++ makes RuntimeErrors of them.",
    "The phase backward in the status page, and PeerLost out of backward.",
)
ENGINE = Name(
    "torch.autograd:Variable._execution_engine",
    "Calls the recorder when a rank's own work in backward is done, just before DDP waits for the others.",
    "Own work in backward is not told from waiting, so no straggler is named under DDP on gloo.",
)
SAVE = Replaced(
    "torch:save",
    "The recorder notes the phase checkpoint.",
    "The phase checkpoint of scripts that call torch.save.",
    also=("torch.serialization",),
)
