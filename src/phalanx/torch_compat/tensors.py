"""torch.Tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.torch_compat import OLDEST_FOR_SHM
from phalanx.torch_compat.names import Name

VERSION = Name(
    "torch:Tensor._version",
    "Whether a tensor was changed before a checkpoint has copied it in the background.",
    "Checkpoints are copied while training waits.",
)
IS_ZERO = Name(
    "torch:Tensor._is_zerotensor",
    "Tensors of zeros that have no memory, as autograd makes them.",
    "shm refuses such tensors.",
    since=OLDEST_FOR_SHM,
)


def zero_check() -> Callable[[Any], bool]:
    """Whether a tensor stands for zeros without any memory."""
    return IS_ZERO.get() or (lambda _: False)
