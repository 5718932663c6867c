"""A function to run on every rank: pickled in the parent, called in the worker.

multiprocessing's own conventions are kept: what can be pickled by name is, the main module of a script is imported
again as ``__mp_main__``, and queues, locks and shared tensors may be passed. A function that cannot be imported (a
notebook's cell, a lambda) is pickled by value, with cloudpickle.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from multiprocessing import forkserver, popen_forkserver, process, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from typing import ClassVar

import cloudpickle

from phalanx.errors import UsageError


class _DescriptorCollector:
    """Takes the place of multiprocessing's Popen while pickling: collects the descriptors that objects send."""

    method = "forkserver"
    DupFd = popen_forkserver._DupFd  # type: ignore[attr-defined]

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1


_CLOUD = cloudpickle.CloudPickler.dispatch_table
_REDUCERS = reduction.ForkingPickler._extra_reducers  # pyright: ignore[reportAttributeAccessIssue]


class _ByValue(cloudpickle.CloudPickler):
    """cloudpickle that knows how multiprocessing sends queues, locks and shared tensors."""

    dispatch_table: ClassVar = ChainMap(_REDUCERS, dict(_CLOUD))


def pack(function: Callable[..., object], args: tuple[object, ...], daemon: bool) -> tuple[bytes, list[int]]:
    """Returns the function with its arguments as bytes, and the descriptors they refer to."""
    if getattr(process.current_process(), "_inheriting", False):
        raise UsageError(
            "phalanx.spawn was called while a new process imports the script; "
            "put the call under `if __name__ == '__main__':`."
        )
    collector = _DescriptorCollector()
    main = sys.modules["__main__"]
    importable_main = getattr(main, "__spec__", None) is not None or getattr(main, "__file__", None) is not None
    by_value = not importable_main or "ipykernel" in sys.modules
    preparation: dict[str, object] = spawn.get_preparation_data("SpawnProcess")
    del preparation["authkey"]  # sent as plain bytes, below: they never leave the machine's memory
    if by_value:
        for name in ("init_main_from_name", "init_main_from_path"):
            preparation.pop(name, None)
    # The tracker must run before the children, or each would start its own and unlink what others use.
    tracker = resource_tracker.getfd()
    assert tracker is not None
    set_spawning_popen(collector)  # pyright: ignore[reportArgumentType]
    try:
        body = _dump((function, args), by_value=by_value)
    finally:
        set_spawning_popen(None)
    authkey = bytes(process.current_process().authkey)
    head = pickle.dumps({"preparation": preparation, "daemon": daemon, "authkey": authkey})
    return pickle.dumps((head, body)), [tracker, *collector.fds]


def _dump(thing: object, *, by_value: bool) -> bytes:
    if not by_value:
        buffer = io.BytesIO()
        try:
            reduction.ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
            return buffer.getvalue()
        except (pickle.PicklingError, AttributeError):
            pass  # a lambda or a local function: no name to find it by
    buffer = io.BytesIO()
    _ByValue(buffer).dump(thing)
    return buffer.getvalue()


def call(rank: int, fds: list[int]) -> None:
    """In the worker: unpickles the function and calls it as ``function(rank, *args)``."""
    pickled, tracker, *inherited = fds
    forkserver._forkserver._inherited_fds = inherited  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    os.lseek(pickled, 0, os.SEEK_SET)
    with os.fdopen(pickled, "rb") as file:
        head, body = pickle.loads(file.read())
    settings = pickle.loads(head)
    this = process.current_process()
    this.authkey = settings["authkey"]
    preparation = {**settings["preparation"], "name": f"SpawnProcess-{rank + 1}", "authkey": settings["authkey"]}
    this._inheriting = True  # type: ignore[attr-defined]
    spawn.prepare(preparation)
    del this._inheriting  # type: ignore[attr-defined]
    this._config["daemon"] = settings["daemon"]  # type: ignore[attr-defined]
    function, args = pickle.loads(body)
    try:
        function(rank, *args)
    finally:
        util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]  # joins queues' feeder threads, as the end of a multiprocessing child does
