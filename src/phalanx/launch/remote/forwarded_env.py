"""Which environment variables travel to the other machines of a run: what makes its ranks find there what is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from phalanx.errors import UsageError

PATTERNS = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*", "LANG", "LC_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "GOMP_*"),
    *("TORCH*", "NCCL_*", "GLOO_*", "CUDA_*", "HF_*", "PET_*", "PHALANX_BACKEND"),
)

STAY = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_*")
"""The GPUs of this machine, and the place of a process in a run around this one: both are wrong elsewhere."""


def pack(environ: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """The variables that travel; ``more`` are the names given by --export."""
    for name in more:
        if name not in environ:
            raise UsageError(f"--export {name}: there is no such variable here; set it, or leave it out.")
    return {name: value for name, value in environ.items() if name in more or _is_forwarded(name)}


def _is_forwarded(name: str) -> bool:
    return any(fnmatchcase(name, each) for each in PATTERNS) and not any(fnmatchcase(name, each) for each in STAY)
