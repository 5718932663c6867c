"""torch's internals: differences between versions, and every private name and every patch, one file per area of torch.

No other package touches them; `names` handles missing ones. Importing this imports no torch. The smoke tests run with
another version than the one in constraints.txt by `make test-torch VERSION=…`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

OLDEST = (2, 6)
"""The oldest version that the smoke tests were run with, as in pyproject.toml."""
SHOWN = ("2.6.0", "2.8.0", "2.10.0", "2.13.0", "2.15.0")
"""The versions that the smoke tests were run with."""
OLDEST_FOR_SHM = (2, 8)
"""The oldest version whose options of a collective have asyncOp."""
FLIGHT_RECORDER_IS_ON = (2, 13)
"""The version that has it on by default. It is off in 2.10; the versions between were not tested."""
COMPILER = "torch._dynamo"
"""The module that DDP, the optimizers and torch.compile import, and that takes longest."""
_GLOO_HAS_LOG_LEVELS = (2, 13)
_LIBUV_TAKES_OPEN_SOCKETS = (2, 8)


def as_text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def release() -> tuple[int, int]:
    """Returns the version of the installed torch, as (2, 13)."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def why_no_shm() -> str | None:
    """Returns why there is no backend shm with this torch on this system; None when there can be one."""
    if sys.platform != "linux":
        return "it needs Linux"
    if release() >= OLDEST_FOR_SHM:
        return None
    import torch

    return f"shm needs torch {as_text(OLDEST_FOR_SHM)} or newer, and this is {torch.__version__}"


def server_options() -> dict[str, bool]:
    """Returns options for a TCPStore on an open socket, which the libuv server of older versions cannot use."""
    return {} if release() >= _LIBUV_TAKES_OPEN_SOCKETS else {"use_libuv": False}


def factor_of(op: Any) -> float:
    """Returns the factor of a PREMUL_SUM. ``factor`` is an attribute since torch 2.11."""
    factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    return float(factor)


@contextlib.contextmanager
def quiet_gloo() -> Iterator[None]:
    """Suppresses gloo's output while a group is created that the script did not ask for.

    Versions without GLOO_LOG_LEVEL write the number of connected ranks to std::cout, so the stream gets its fail bit
    meanwhile. Python's own output does not use that stream.
    """
    try:
        set_state = None if release() >= _GLOO_HAS_LOG_LEVELS else _state_setter_of_cout()
    except (OSError, AttributeError, ValueError):  # another C++ library than GNU's
        set_state = None
    if set_state is None:
        yield
        return
    set_state(4)  # std::ios::failbit
    try:
        yield
    finally:
        set_state(0)


def _state_setter_of_cout() -> Callable[[int], None]:
    library = ctypes.CDLL("libstdc++.so.6")
    clear = library._ZNSt9basic_iosIcSt11char_traitsIcEE5clearESt12_Ios_Iostate  # std::ios::clear
    cout = ctypes.addressof(ctypes.c_void_p.in_dll(library, "_ZSt4cout"))
    # std::ios is a virtual base of std::ostream: its offset is three words before the table of virtual functions.
    table = ctypes.c_ssize_t.from_address(cout).value
    base = cout + ctypes.c_ssize_t.from_address(table - 3 * ctypes.sizeof(ctypes.c_void_p)).value
    return functools.partial(clear, ctypes.c_void_p(base))
