"""Loads the C library and describes it to ctypes; csrc/phalanx_shm.h documents it."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path

from phalanx.errors import PhalanxError

LIBRARY = Path(__file__).with_name("libphalanx_shm.so")
WHY_NOT = Path(__file__).with_name("not_built.txt")
"""Written by setup.py when there was no compiler, or it failed: a line with the reason, then the compiler's output."""

VERSION = 5
MAX_RANKS = 256

OK, INTERRUPTED, FAILED = range(3)
REFUSALS = {
    "NO_DATA": "it was given no memory for its elements",
    "NO_ARGUMENT": "an argument is missing",
    "UNALIGNED": "its memory begins in the middle of a cache line",
    "BAD_RANK": f"a rank is out of range, or there are more than {MAX_RANKS}",
    "NOT_FORMATTED": "its memory has not been prepared by phalanx",
    "OTHER_VERSION": "its memory has been prepared by another version of phalanx; install the same one for all ranks",
    "BAD_SIZE": "its memory has another size, or is for another number of ranks",
    "BAD_PIDFD": "the descriptor of a process is not open",
    "OUT_OF_MEMORY": "there is no memory left",
    "BAD_ORDER": "the collective before it has not ended",
    "BAD_OP": "there is no such operation",
    "BAD_ROOT": "the root is not a rank of the group",
    "BAD_WIDTH": "the size of an element is not that of its type",
    "BAD_REDUCTION": "this type does not support that reduction",
    "BAD_COUNT": "its elements are more than a process can address",
}
"""The results from FAILED + 1 on, in the order of enum phx_result: the call was refused and did nothing."""

(BARRIER, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, REDUCE_SCATTER, SCATTER, ALL_TO_ALL) = range(9)
OPS = (
    *("barrier", "all_reduce", "reduce", "broadcast", "all_gather", "gather"),
    *("reduce_scatter", "scatter", "all_to_all"),
)

NO_FAILURE, BEING_WRITTEN, MISMATCH, SPLITS, LOST, LEFT, TIMEOUT, ABORTED = range(8)


def refusal(result: int) -> str:
    """Returns why a call was refused."""
    return list(REFUSALS.values())[result - FAILED - 1]


def nanoseconds(seconds: float) -> int:
    """Returns the value for `timeout_ns`, at most three hundred years."""
    return int(min(seconds, 1e10) * 1e9)


class NotBuilt(PhalanxError):
    """The library is missing or cannot be loaded; the message has the reason."""


class Call(Structure):
    """phx_call: what one rank does in a collective."""

    _fields_ = (
        ("op", c_uint32),
        ("reduce", c_uint32),
        ("dtype", c_uint32),
        ("width", c_uint32),
        ("root", c_int32),
        ("yield_microseconds", c_uint32),
        ("count", c_uint64),
        ("factor", c_double),
        ("timeout_ns", c_uint64),
        ("input", c_void_p),
        ("output", c_void_p),
        ("inputs", POINTER(c_void_p)),
        ("outputs", POINTER(c_void_p)),
        ("sends", POINTER(c_uint64)),
        ("receives", POINTER(c_uint64)),
    )


class Signature(Structure):
    """phx_signature: what must be equal on all ranks."""

    _fields_ = (
        ("op", c_uint32),
        ("reduce", c_uint32),
        ("dtype", c_uint32),
        ("root", c_int32),
        ("count", c_uint64),
        ("factor", c_double),
    )


class Failure(Structure):
    """phx_failure: the first failure of a group."""

    _fields_ = (
        ("kind", c_uint32),
        ("finder", c_int32),
        ("culprit", c_int32),
        ("receiver", c_int32),
        ("number", c_uint64),
        ("finders", Signature),
        ("culprits", Signature),
        ("sent", c_uint64),
        ("expected", c_uint64),
        ("timeout_ns", c_uint64),
        ("missing", c_uint64 * (MAX_RANKS // 64)),
    )

    def missing_ranks(self) -> list[int]:
        return [rank for rank in range(MAX_RANKS) if self.missing[rank // 64] >> (rank % 64) & 1]


class Log(Structure):
    """phx_log: where the library writes to the status page."""

    _fields_ = (
        ("record", c_uint64),
        ("kind", c_uint64),
        ("number", c_uint64),
        ("size", c_uint64),
        ("place", c_uint64),
        ("no_peer", c_uint64),
        ("entries", c_uint64),
        ("ring", c_void_p),
        ("waited", c_void_p),
        ("blocked", c_void_p),
        ("phase", c_void_p),
        ("blocked_since", c_void_p),
        ("thread", c_uint64),
    )


_PROTOTYPES = {
    "phx_segment_bytes": (c_uint64, [c_int, c_uint64]),
    "phx_format": (None, [c_void_p, c_int, c_uint64]),
    "phx_open": (c_int, [c_void_p, c_uint64, c_int, c_int, POINTER(c_int), POINTER(c_void_p)]),
    "phx_close": (None, [c_void_p]),
    "phx_keep_log": (None, [c_void_p, POINTER(Log)]),
    "phx_run": (c_int, [c_void_p, c_void_p]),
    "phx_resume": (c_int, [c_void_p]),
    "phx_is_interrupted": (c_int, [c_void_p]),
    "phx_abort": (None, [c_void_p]),
    "phx_get_failure": (None, [c_void_p, POINTER(Failure)]),
    "phx_version": (c_int, []),
    "phx_instructions": (c_char_p, []),
    "phx_use_instructions": (c_int, [c_char_p]),
    "phx_can_reduce": (c_int, [c_uint32, c_uint32]),
    "phx_obey_own_session": (c_int, [c_int]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the loaded library; raises NotBuilt when there is none of this version."""
    try:
        lib = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        # Its first line is the reason, the rest the compiler's output.
        reason = WHY_NOT.read_text().partition("\n")[0] if WHY_NOT.exists() else str(error)
        raise NotBuilt(f"the shm library is not there: {reason}") from None
    try:
        found = lib.phx_version()  # before anything else: an older library lacks some of the functions
    except AttributeError:
        raise NotBuilt(f"{LIBRARY} is not the shm library of phalanx: install phalanx again") from None
    if found != VERSION:
        raise NotBuilt(f"the shm library has version {found}, not {VERSION}: install phalanx again")
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def why_not() -> str | None:
    """Returns why the library cannot be used here; None when it can."""
    try:
        library()
    except NotBuilt as error:
        return str(error)
    return None


def describe() -> dict[str, str]:
    """Returns version and vector code of the library, or why it is not used, for `phalanx doctor`."""
    reason = why_not()
    if reason is not None:
        return {"shm": reason}
    lib = library()
    return {"shm": f"version {lib.phx_version()}, {lib.phx_instructions().decode()}"}
