"""What differs between operating systems. Runs of several processes need Linux; a world of one works on any."""

from __future__ import annotations

import os
import sys

from phalanx.errors import UsageError

_NAMES = {"win32": "Windows", "darwin": "macOS"}


def require_linux(what: str) -> None:
    """An error for what needs fork, /proc and signals as Linux has them."""
    if sys.platform != "linux":
        name = _NAMES.get(sys.platform, sys.platform)
        where = "WSL2" if name == "Windows" else "a Linux machine or container"
        raise UsageError(
            f"{what} needs Linux, and this is {name}: use {where}, or run the script alone (python train.py)."
        )


def affinity() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
