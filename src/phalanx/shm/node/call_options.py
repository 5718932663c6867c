"""What torch says about a collective beside its tensors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

UNSET = c10d.AllreduceOptions().timeout
Options = Any
"""torch's AllreduceOptions and its sisters: they have asyncOp, and what the collective needs."""


def options_of(given: Options, kind: type) -> Options:
    """torch's own groups may be called without options, and with an operator in their place."""
    if type(given) is kind:
        return given
    if given is None:
        return kind()
    if isinstance(given, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        options = kind()
        options.reduceOp = given
        return options
    return given
