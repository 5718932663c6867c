"""Facts of the kernel and the operating system about this machine and its processes."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.errors import UsageError


def require_linux(what: str) -> None:
    """Raises UsageError elsewhere: ``what`` needs fork, /proc and signals as Linux has them."""
    if sys.platform != "linux":
        name = {"win32": "Windows", "darwin": "macOS"}.get(sys.platform, sys.platform)
        where = "WSL2" if name == "Windows" else "a Linux machine or container"
        raise UsageError(
            f"{what} needs Linux, and this is {name}: use {where}, or run the script alone (python train.py)."
        )


def text(path: Path) -> str:
    """A file of /sys, without the newline; empty where the kernel has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def in_bytes(count: float) -> str:
    """A size of memory or of a disk as text, in binary units: ``512 MiB``, ``23.5 GiB``."""
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def in_decimal_bytes(count: int) -> str:
    """A size of files as text, with three digits: ``1.25 GB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.{2 if count < 10 * size else 1}f} {unit}"
    return f"{count} bytes"
