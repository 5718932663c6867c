"""Numbers of bytes as text."""

from __future__ import annotations


def in_bytes(count: float) -> str:
    """A size of memory or of a disk, in binary units: ``512 MiB``, ``23.5 GiB``."""
    if count < 2**30:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:.1f} GiB"


def in_decimal_bytes(count: int) -> str:
    """A size of files, with three digits: ``1.25 GB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.{2 if count < 10 * size else 1}f} {unit}"
    return f"{count} bytes"
