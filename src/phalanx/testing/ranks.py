"""`run_ranks` runs a function on real ranks and returns their results.

    from phalanx.testing import run_ranks

    def add_up(world):
        import torch, torch.distributed as dist
        total = torch.tensor(float(world.rank))
        dist.all_reduce(total)
        return total.item()

    def test_add_up():
        assert run_ranks(add_up, 4) == [6.0] * 4

The first call imports torch once, in a helper process; each further call takes some milliseconds. The ranks share the
cores, as under ``phalanx run``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import threading
from collections.abc import Callable
from multiprocessing import reduction, util
from typing import Any, TypeVar

from phalanx.errors import PhalanxError
from phalanx.fd_channel import anonymous_file
from phalanx.launch.process.zygote_client import ZygoteClient
from phalanx.launch.spawn import SpawnContext, new_zygote
from phalanx.launch.spec.device_count import thread_setting
from phalanx.torch_compat import COMPILER

T = TypeVar("T")
_warm: ZygoteClient | None = None


def run_ranks(
    fn: Callable[..., T],
    n: int,
    *args: object,
    join_group: bool = True,
    backend: str | None = None,
    timeout: float = 60.0,
) -> list[T]:
    """Runs ``fn(world, *args)`` on ``n`` ranks and returns their results, by rank.

    Args:
        fn: a function; a local one or a lambda will do.
        join_group: call phalanx.init() first and hand its World over; otherwise ``fn`` gets the rank's number.
        backend: the backend for phalanx.init(), such as ``shm`` or ``gloo``.
        timeout: seconds after which the ranks are killed and an error is raised.

    Raises what torch.multiprocessing.spawn raises if a rank fails: ProcessRaisedException with its traceback.
    """
    with contextlib.ExitStack() as stack:
        slots = [stack.enter_context(contextlib.closing(_Slot(anonymous_file("result")))) for _ in range(n)]
        context = SpawnContext(_call, (fn, args, slots, join_group, backend), n, daemon=False, zygote=_warm_zygote())
        stack.callback(context.close)
        if not context.join(timeout):
            name = getattr(fn, "__name__", repr(fn))
            raise PhalanxError(f"{name} did not end on all of {n} ranks within {timeout:g} s.")
        return [slot.load() for slot in slots]


def close() -> None:
    """Ends the helper process; the next `run_ranks` starts a new one."""
    global _warm
    if _warm is not None:
        _warm.close()
        _warm = None


def _warm_zygote() -> ZygoteClient:
    global _warm
    if _warm is not None and _warm.has_ended:
        close()
    if _warm is None:
        # DDP and the optimizers import torch._dynamo, which takes longer than most tests: once here, for all.
        _warm = new_zygote(late=(COMPILER,))
        atexit.register(close)
    return _warm


class _Slot:
    """A piece of memory that a rank writes its result to; a pipe could fill up before anybody reads it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __getstate__(self) -> object:
        return reduction.DupFd(self._fd)

    def __setstate__(self, duplicate: Any) -> None:
        self._fd = duplicate.detach()

    def store(self, result: object) -> None:
        with os.fdopen(os.dup(self._fd), "wb") as file:
            pickle.dump(result, file)

    def load(self) -> Any:
        os.lseek(self._fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._fd), "rb") as file:
            return pickle.load(file)

    def close(self) -> None:
        os.close(self._fd)


def _call(
    rank: int, fn: Callable[..., T], args: tuple[object, ...], slots: list[_Slot], join_group: bool, backend: str | None
) -> None:
    _share_cores(len(slots))
    if join_group:
        import phalanx

        with phalanx.init(backend) as world:
            slots[rank].store(fn(world, *args))
    else:
        slots[rank].store(fn(rank, *args))
    _leave()


def _share_cores(ranks: int) -> None:
    """Ranks with as many threads as there are cores would spend their time waiting for each other."""
    setting = thread_setting(ranks, os.environ)
    os.environ.update(setting)
    if setting:
        import torch

        torch.set_num_threads(int(setting["OMP_NUM_THREADS"]))


def _leave() -> None:
    """Ends the interpreter without deleting its modules.

    That would copy most of the memory that is shared with the helper, and take longer than most tests.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    util._flush_std_streams()  # pyright: ignore[reportAttributeAccessIssue]
    os._exit(0)
