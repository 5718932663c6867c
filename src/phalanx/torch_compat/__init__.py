"""torch's internals: what differs between its versions, and every private name and every patch, one file per area.

No other package touches them; `names` has what happens where one is missing. Importing this imports no torch.

`make test-torch VERSION=…` runs the smoke tests with another version than the one in constraints.txt.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

OLDEST = (2, 6)
"""The oldest version that the smoke tests have been run with; pyproject.toml says the same."""
SHOWN = ("2.6.0", "2.8.0", "2.10.0", "2.13.0", "2.15.0")
"""The versions that the smoke tests have been run with."""
OLDEST_FOR_SHM = (2, 8)
"""Before it, the options of a collective do not say whether it is asynchronous."""
FLIGHT_RECORDER_IS_ON = (2, 13)
"""Without a variable that turns it on. 2.10 has it off; between the two nobody has looked."""
COMPILER = "torch._dynamo"
"""What DDP, the optimizers and torch.compile import, and takes longest of all."""
_GLOO_HAS_LOG_LEVELS = (2, 13)
_LIBUV_TAKES_OPEN_SOCKETS = (2, 8)


def as_text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def release() -> tuple[int, int]:
    """The version of the installed torch, as (2, 13)."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def why_no_shm() -> str | None:
    """Why there is no backend shm with this torch, on this system; None when there can be one."""
    if sys.platform != "linux":
        return "it needs Linux"
    if release() >= OLDEST_FOR_SHM:
        return None
    import torch

    return f"shm needs torch {as_text(OLDEST_FOR_SHM)} or newer, and this is {torch.__version__}"


def server_options() -> dict[str, bool]:
    """For a TCPStore that serves on an open socket: its libuv server cannot take one in older versions."""
    return {} if release() >= _LIBUV_TAKES_OPEN_SOCKETS else {"use_libuv": False}


def factor_of(op: Any) -> float:
    """The factor of a ReduceOp that is PREMUL_SUM. ``factor`` is an attribute since torch 2.11."""
    factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    return float(factor)


@contextlib.contextmanager
def quiet_gloo() -> Iterator[None]:
    """Around the creation of a gloo group that no script has asked for.

    In versions without GLOO_LOG_LEVEL gloo writes to std::cout to how many ranks it is connected, so the stream gets
    its fail bit for that moment. Python's own output is not part of that stream.
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
    # std::ios is a virtual base of std::ostream: its place stands three words before the table of virtual functions.
    table = ctypes.c_ssize_t.from_address(cout).value
    base = cout + ctypes.c_ssize_t.from_address(table - 3 * ctypes.sizeof(ctypes.c_void_p)).value
    return functools.partial(clear, ctypes.c_void_p(base))
