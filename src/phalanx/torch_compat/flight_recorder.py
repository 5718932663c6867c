"""torch's flight recorder: the collectives of gloo and nccl, and how far each group has come."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from phalanx.torch_compat import FLIGHT_RECORDER_IS_ON
from phalanx.torch_compat.names import Name

_NATIVE = "torch._C._distributed_c10d"
_LOST = "Reports on ranks that hang do not number the collective of {} that each is in."
TRACE = Name(
    f"{_NATIVE}:_dump_fr_trace",
    "The latest collectives, with the lines that called them.",
    _LOST.format("gloo"),
    since=FLIGHT_RECORDER_IS_ON,
)
PROGRESS = Name(
    f"{_NATIVE}:_dump_fr_trace_json",
    "The progress of each group, ten times a second.",
    _LOST.format("gloo"),
    since=FLIGHT_RECORDER_IS_ON,
)
NCCL_TRACE = Name(f"{_NATIVE}:_dump_nccl_trace", "The latest collectives of nccl.", _LOST.format("nccl"), since=None)
NCCL_PROGRESS = Name(
    f"{_NATIVE}:_dump_nccl_trace_json", "The progress of nccl's groups.", _LOST.format("nccl"), since=None
)
COMPILER = Name(
    "torch._inductor",
    "torch asks its compiler whether it has generated a line; a stub answers until the compiler is loaded.",
    "The first report on a rank takes seconds, because torch imports its compiler.",
)


class Dump(NamedTuple):
    """One recorder: nccl's collectives are in one of their own."""

    progress: Callable[[bool, bool], str]
    """As JSON."""
    trace: Callable[[bool, bool, bool], bytes]
    """As a pickle."""


@functools.cache
def dumps() -> list[Dump]:
    """The recorders of this torch."""
    import torch.distributed as dist

    pairs = [(PROGRESS, TRACE), *([(NCCL_PROGRESS, NCCL_TRACE)] if dist.is_nccl_available() else [])]
    found = [(progress.get(), trace.get()) for progress, trace in pairs]
    return [Dump(*pair) for pair in found if None not in pair]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """While torch turns addresses into lines.

    For every frame it asks its compiler whether the code is one that it has written, and for that imports it, which
    takes seconds and hundreds of modules. As long as nobody has loaded it, it has written nothing.
    """
    if COMPILER.path in sys.modules or COMPILER.get() is None:
        yield
        return
    module: dict[str, Any] = vars(sys.modules["torch"])
    module[COMPILER.attribute] = _StandIn()
    try:
        yield
    finally:
        if isinstance(module.get(COMPILER.attribute), _StandIn):  # somebody may have imported the real one meanwhile
            del module[COMPILER.attribute]


class _StandIn:
    """Knows of no code; another thread that wants anything else gets the real one."""

    class codecache:
        class PyCodeCache:
            @staticmethod
            def stack_frames_for_code(path: str, lineno: int) -> None:
                return None

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(COMPILER.path), name)
