"""Which launcher started this process, and what it says about its rank and its node.

One file a kind. The contract: ``detect(environ)`` gives a Situation when the launcher's variables are there, and
None when they are not; variables that are there but wrong are a UsageError that names them.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cluster import openmpi, single, slurm, torchrun
from phalanx.cluster.situation import Situation

__all__ = ["Situation", "find"]


def find(environ: Mapping[str, str]) -> Situation:
    """The first kind that recognises itself: the nearest launcher wins over the one around it."""
    for kind in (torchrun, slurm, openmpi):
        situation = kind.detect(environ)
        if situation is not None:
            return situation
    return single.detect(environ)
