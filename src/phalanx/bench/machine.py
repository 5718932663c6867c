"""The machine that figures were measured on, in words."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata, util
from pathlib import Path

from phalanx.system import cores


def describe(*packages: str) -> dict[str, str]:
    """What one must know to compare figures, with the versions of torch, phalanx and ``packages``.

    They come from the packages' metadata: nothing is imported.
    """
    import psutil

    return {
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "CPU": _cpu_model(),
        "cores": f"{cores.usable()} usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load at the start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": version("torch"),
        "phalanx": version("phalanx"),
        **{package: version(package) for package in packages},
    }


def version(package: str) -> str:
    return metadata.version(package) if installed(package) else "not installed"


def installed(package: str) -> bool:
    return util.find_spec(package) is not None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    return platform.processor() or "unknown"
