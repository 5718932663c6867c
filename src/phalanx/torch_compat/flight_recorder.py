"""torch's flight recorder: the collectives of gloo and nccl, and the progress of each group."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from phalanx.torch_compat import FLIGHT_RECORDER_IS_ON
from phalanx.torch_compat.names import Name

NCCL = "nccl"
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
    """The functions of one recorder; nccl has its own, whose collectives are read with the device's events."""

    backend: str
    progress: Callable[[bool, bool], str]
    """Returns JSON."""
    trace: Callable[[bool, bool, bool], bytes]
    """Returns a pickle."""


@functools.cache
def dumps() -> list[Dump]:
    """Returns the recorders of this torch."""
    import torch.distributed as dist

    pairs = {"gloo": (PROGRESS, TRACE)} | ({NCCL: (NCCL_PROGRESS, NCCL_TRACE)} if dist.is_nccl_available() else {})
    found = [(backend, progress.get(), trace.get()) for backend, (progress, trace) in pairs.items()]
    return [Dump(*of) for of in found if None not in of]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Keeps torch from importing its compiler while it turns addresses into lines.

    For every frame torch asks its compiler whether it has generated the code. Importing it takes seconds and hundreds
    of modules; as long as it is not loaded, it has generated none.
    """
    if COMPILER.path in sys.modules or COMPILER.get() is None:
        yield
        return
    module = vars(sys.modules["torch"])
    module[COMPILER.attribute] = _StandIn()
    try:
        yield
    finally:
        if isinstance(module.get(COMPILER.attribute), _StandIn):  # another thread may have imported the real one
            del module[COMPILER.attribute]


class _StandIn:
    """A compiler that has generated no code; all other attributes are those of the real one."""

    class codecache:
        class PyCodeCache:
            @staticmethod
            def stack_frames_for_code(path: str, lineno: int) -> None:
                return None

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(COMPILER.path), name)
