"""torch's log settings."""

from __future__ import annotations

from phalanx.torch_compat.names import Name

INIT_LOGS = Name(
    "torch._logging._internal:_init_logs",
    "TORCH_LOGS that a script sets before its import of torch is applied in a forked worker.",
    "TORCH_LOGS has an effect in a forked worker only when it is set in the shell.",
)
