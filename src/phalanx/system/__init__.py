"""What the kernel and the operating system report of this machine and its processes."""

from __future__ import annotations

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
