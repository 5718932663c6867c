"""Lines for torch's flight recorder without torch's compiler.

For every frame torch asks its compiler whether the code is one that it has written, and for that imports it, which
takes seconds and hundreds of modules. As long as nobody has loaded it, it has written nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

_COMPILER = "torch._inductor"


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """While torch turns addresses into lines."""
    if _COMPILER in sys.modules:
        yield
        return
    module: dict[str, Any] = torch.__dict__
    module["_inductor"] = _StandIn()
    try:
        yield
    finally:
        if isinstance(module.get("_inductor"), _StandIn):  # somebody may have imported the real one meanwhile
            del module["_inductor"]


class _StandIn:
    """Knows of no code; another thread that wants anything else gets the real one."""

    class codecache:
        class PyCodeCache:
            @staticmethod
            def stack_frames_for_code(path: str, lineno: int) -> None:
                return None

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_COMPILER), name)
