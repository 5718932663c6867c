"""The launcher that started this process, and the rank and node that it gives to it.

Each kind has a file with ``detect(environ)``, which returns a Situation if the launcher's variables are there, else
None. Variables that are there but wrong are a UsageError that names them.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cluster import openmpi, slurm, torchrun
from phalanx.cluster.situation import Situation, master_from

__all__ = ["Situation", "find"]


def find(environ: Mapping[str, str]) -> Situation:
    """Returns the situation by the innermost launcher; without one, ``python train.py`` is a world of one."""
    for kind in (torchrun, slurm, openmpi):
        situation = kind.detect(environ)
        if situation is not None:
            return situation
    return Situation("single", 0, 1, 0, 1, 0, 1, master_from(environ))
