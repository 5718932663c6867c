"""The shared memory of a group, as an anonymous file that disappears with its last process.

The first rank makes the file (memfd), and the others open it under /proc. The size of /dev/shm does not limit it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.errors import ForeignData, JoinError, PeerLost, UsageError
from phalanx.native import library
from phalanx.shm.node import failures
from phalanx.shm.node.failures import Names
from phalanx.store.join import Claim
from phalanx.store.primitives import read, wait_for, write
from phalanx.system import procfs

if TYPE_CHECKING:
    from torch.distributed import Store

_FILE = "phalanx-shm"
_LARGEST_SLOT = 1 << 20
_SMALLEST_SLOT = 1 << 17
_ALL_SLOTS = 16 << 20
"""Bytes of all slots together: about the size of a shared cache."""
YIELD_MICROSECONDS = 200
"""Microseconds for which a wait yields the core before it sleeps."""


def why_not_here() -> str | None:
    """Returns what this system lacks for shared memory between ranks; None when it lacks nothing."""
    reason = library.why_not()
    if reason is not None:
        return reason
    try:
        os.close(os.memfd_create("phalanx"))
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"this system has no memfd or no pidfd ({error})"
    return None


class Segment:
    """The mapped memory of a group, with the library's handle of this rank."""

    def __init__(self, store: Store, claims: Sequence[Claim], rank: int, timeout: float, names: Names) -> None:
        """``claims`` are those of the group's ranks, all on this machine; ``rank`` is the index of this one."""
        size = len(claims)
        if size > library.MAX_RANKS:
            raise UsageError(f"backend 'shm' takes at most {library.MAX_RANKS} ranks, not {size}; use gloo.")
        self._lib = library.library()
        self._names = names
        slot = max(_SMALLEST_SLOT, min(_LARGEST_SLOT, _ALL_SLOTS // (2 * size))) // 4096 * 4096
        self._bytes = self._lib.phx_segment_bytes(size, slot)
        with contextlib.ExitStack() as stack:
            if rank == 0:
                fd = os.memfd_create(_FILE)
                stack.callback(os.close, fd)
                os.ftruncate(fd, self._bytes)
                self._map(fd)
                self._lib.phx_format(self._base, size, slot)
                write(store, "segment", fd)
            else:
                fd = _open(claims[0], _await_file(store, claims[0], timeout))
                stack.callback(os.close, fd)
                self._map(fd)
            self.pidfds = pidfds = [-1 if other == rank else _watch(claims[other]) for other in range(size)]
            self.handle = self._open_handle(rank, pidfds)
            self._leave = weakref.finalize(self, _leave, self._lib, self.handle, pidfds, os.getpid())
            self._leave.atexit = False  # the end of the process closes everything, and peers see it by the pidfd
            # Until all have mapped the file, the first rank must keep it open.
            self.run(
                library.Call(
                    op=library.BARRIER,
                    root=-1,
                    timeout_ns=library.nanoseconds(timeout),
                    yield_microseconds=YIELD_MICROSECONDS,
                )
            )

    def _map(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, self._bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def _open_handle(self, rank: int, pidfds: list[int]) -> int:
        handle, size = ctypes.c_void_p(), len(pidfds)
        descriptors = (ctypes.c_int * size)(*pidfds)
        result = self._lib.phx_open(self._base, self._bytes, rank, size, descriptors, ctypes.byref(handle))
        if handle.value is None:
            raise JoinError(f"rank {rank} cannot use the memory of the group: {library.refusal(result)}.")
        return handle.value

    def set_log(self, log: library.Log | None) -> None:
        """Makes the library write what it runs to the status page of this log, or nowhere."""
        self._log = log  # the handle refers to it
        self._lib.phx_keep_log(self.handle, None if log is None else ctypes.byref(log))

    def run(self, call: library.Call) -> None:
        """Runs a collective to its end. Signal handlers run meanwhile, and one that raises ends it."""
        try:
            result = self._lib.phx_run(self.handle, ctypes.addressof(call))
            while result == library.INTERRUPTED:
                result = self._lib.phx_resume(self.handle)
        except BaseException:
            if self._lib.phx_is_interrupted(self.handle):
                self.abort()  # the others would wait for this rank
            raise
        if result == library.FAILED:
            raise self.failure()
        if result != library.OK:
            name = library.OPS[call.op] if call.op < len(library.OPS) else f"operation {call.op}"
            raise UsageError(f"{name} was refused: {library.refusal(result)}. Nothing has been exchanged.")

    def failure(self) -> Exception:
        """Returns the group's first failure, as an exception."""
        record = library.Failure()
        self._lib.phx_get_failure(self.handle, ctypes.byref(record))
        return failures.to_exception(record, self._names)

    @property
    def has_failed(self) -> bool:
        record = library.Failure()
        self._lib.phx_get_failure(self.handle, ctypes.byref(record))
        return record.kind != library.NO_FAILURE

    def abort(self) -> None:
        """Ends every wait in the group, on every rank. The group cannot be used afterwards."""
        self._lib.phx_abort(self.handle)

    def close(self) -> None:
        """Leaves the group. No collective may be running."""
        self._leave()
        self._memory.close()


def _leave(lib: ctypes.CDLL, handle: int, pidfds: list[int], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has a copy of this, but is no rank
    lib.phx_close(handle)
    for fd in pidfds:
        if fd >= 0:
            os.close(fd)


def _await_file(store: Store, owner: Claim, timeout: float) -> int:
    """Waits for the owner's descriptor of the file."""

    def died(_: float) -> PeerLost | None:
        return PeerLost(f"{owner} ended while the group was being formed.") if owner.has_died else None

    if not wait_for(store, "segment", timeout, died):
        raise JoinError(f"{owner} has not made the memory of the group within {timeout:g} s.")
    return read(store, "segment", int)


def _open(owner: Claim, fd: int) -> int:
    """Opens the file. Both numbers come from the store, so it must be a memory file of this user."""
    path = procfs.fd_path(owner.pid, fd)
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)  # does nothing to a file of another kind
        try:
            return _checked(found, path)
        finally:
            os.close(found)
    except FileNotFoundError:
        raise PeerLost(f"{owner} ended while the group was being formed.") from None
    except OSError as error:
        raise JoinError(f"{path} cannot be opened ({error.strerror}); do all ranks run as the same user?") from None


def _checked(found: int, path: str) -> int:
    own = procfs.fd_path("self", found)
    is_memory = os.readlink(own).startswith(f"/memfd:{_FILE} ")  # noqa: PTH115
    if not is_memory or os.fstat(found).st_uid != os.geteuid():
        raise ForeignData(f"{path} is not the memory of the group; somebody else can write to the store.")
    return os.open(own, os.O_RDWR | os.O_CLOEXEC)


def _watch(claim: Claim) -> int:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(claim.pid)
        if not claim.has_died:
            return fd
        os.close(fd)
    raise PeerLost(f"{claim} ended while the group was being formed.")
