"""torch's dynamic rendezvous: its state, which phalanx keeps in the store as plain data."""

from __future__ import annotations

from phalanx.torch_compat.names import Name

_MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_LOST = "Runs whose number of nodes may change (--nnodes 1:4) are refused; a fixed number works."
STATE = Name(f"{_MODULE}:_RendezvousState", "The state that torch decides by, made of what stands in the store.", _LOST)
NODE = Name(f"{_MODULE}:_NodeDesc", "A node in that state.", _LOST)


def why_not() -> str | None:
    """Why nodes cannot come and go with this torch; None when they can."""
    missing = [str(name) for name in (STATE, NODE) if name.get() is None]
    return f"this torch has no {' and no '.join(missing)}" if missing else None
