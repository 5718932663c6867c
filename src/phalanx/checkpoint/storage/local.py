"""Checkpoints on a disk: written to a temporary directory, synced, renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from phalanx import run_files
from phalanx.checkpoint.storage.base import ALIGNMENT, Storage
from phalanx.errors import UsageError
from phalanx.system import procfs

_LOCK = ".writer"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""The errors of a file system without locks."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Windows has neither."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | _NO_LINK
_LEAST_DIRECT = 1 << 20
_locked: dict[tuple[int, int, int], Storage] = {}
"""The directories that this process writes to, by process, device and inode. A record lock belongs to the whole
process, and is lost when any file descriptor of its file is closed."""


class LocalStorage(Storage):
    """A directory, on a disk that all ranks share."""

    def __init__(self, path: str, mode: int | None = None) -> None:
        self.path = path
        self._root = Path(path).expanduser().absolute()
        self._is_mode_given = mode is not None
        self._mode = _default_mode() if mode is None else mode

    def directories(self) -> list[str]:
        try:
            return [entry.name for entry in os.scandir(self._root) if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise UsageError(f"{self.path} is a file, not a directory of checkpoints; give another path.") from None
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}; give another path.") from None

    def sizes(self, directory: str) -> dict[str, int]:
        with os.scandir(self._root / directory) as found:
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in found}

    def open(self, directory: str, name: str) -> IO[bytes]:
        path = self._root / directory / name
        return os.fdopen(run_files.open_to_read(path, getattr(os, "O_BINARY", 0)), "rb")

    @contextlib.contextmanager
    def create(self, directory: str, name: str) -> Iterator[IO[bytes]]:
        with self._opened(directory) as at:
            path = name if at is not None else os.fspath(self._root / directory / name)
            _unlink(path, at)  # left over by a save that failed
            fd = os.open(path, _CREATE, self._mode, dir_fd=at)
            try:
                if self._is_mode_given:  # the umask does not apply to it
                    os.chmod(fd if os.chmod in os.supports_fd else path, self._mode)  # noqa: PTH101 (follows no link)
                yield cast(IO[bytes], _DirectWriter(fd))
                os.fsync(fd)
            except BaseException:
                _unlink(path, at)  # so that a full disk has room again for the logs
                raise
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def _opened(self, directory: str) -> Iterator[int | None]:
        """Opens the directory of a save; None on a system that cannot open files relative to one.

        It must belong to this user: a team may share the path, and somebody else could have put a link there.
        """
        if os.open not in os.supports_dir_fd:
            yield None
            return
        try:
            at = run_files.open_own(self._root / directory)
        except (NotADirectoryError, PermissionError) as error:
            reason = f"{directory} is no directory of this user ({error.strerror}); see who else can write there"
            raise PermissionError(errno.EPERM, reason) from None
        try:
            yield at
        finally:
            os.close(at)

    def make_directory(self, directory: str) -> None:
        self._make(self._root)
        self._make(self._root / directory)

    def _make(self, directory: Path) -> None:
        """Whoever may read the files may list the directory."""
        mode = self._mode | (self._mode & 0o444) >> 2
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode)
            if self._is_mode_given:
                with self._opened(os.fspath(directory)) as at:
                    os.chmod(directory if at is None else at, mode)  # noqa: PTH101 (follows no link)

    def names_for(self, step: int, token: str) -> tuple[str, str]:
        # An earlier checkpoint of this step keeps its name until the new one is whole, so there is always one of them.
        is_taken = os.path.lexists(self._root / f"step-{step}")
        return f"step-{step}.tmp-{token}", f"step-{step}.{token}" if is_taken else f"step-{step}"

    def publish(self, temporary: str, final: str) -> None:
        # The names of the files have to be on the disk before the name of their directory is.
        _sync(self._root / temporary)
        (self._root / temporary).rename(self._root / final)
        _sync(self._root)

    def use_plain_name(self, final: str) -> None:
        plain = final.partition(".")[0]
        if final != plain:
            (self._root / final).rename(self._root / plain)
            _sync(self._root)

    def remove(self, directory: str) -> None:
        target = self._root / directory
        if ".tmp-" not in directory and ".old-" not in directory:
            target = target.rename(self._root / f"{directory}.old-{uuid.uuid4().hex[:8]}")
        shutil.rmtree(target)

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self._root).free

    def lock(self) -> Callable[[], None]:
        self._make(self._root)
        root = self._root.stat()
        key = os.getpid(), root.st_dev, root.st_ino
        if _locked.setdefault(key, self) is not self:
            raise UsageError(
                f"checkpoints in {self.path} are being written by another px.Checkpointer of this process; "
                "close() that one first, or give this one another path."
            )
        try:
            unlock = self._lock()
        except BaseException:
            del _locked[key]
            raise

        def end() -> None:
            try:
                unlock()
            finally:
                del _locked[key]

        return end

    def _lock(self) -> Callable[[], None]:
        """Takes a record lock, which ends with the process and is not inherited by children. Windows has none."""
        try:
            import fcntl
        except ImportError:
            return lambda: None
        path = self._root / _LOCK
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, self._mode)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(fd, 200).decode(errors="replace").strip()
                os.close(fd)
                if error.errno in _NO_LOCKS:
                    return lambda: None
                raise UsageError(
                    f"checkpoints in {self.path} are being written by {owner or 'another run'}; "
                    "give this run another path, or end that one."
                ) from None
            if _is_at(fd, path):
                break
            os.close(fd)  # its owner has just removed it
        if self._is_mode_given:
            os.fchmod(fd, self._mode)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on host {socket.gethostname()}".encode(), 0)

        def unlock() -> None:
            path.unlink(missing_ok=True)
            os.close(fd)

        return unlock


def _default_mode() -> int:
    """Returns the mode for the owner alone, unless the umask is one for a group: one that shuts out all others."""
    known = procfs.status("self").get("Umask")
    if known is not None:
        umask = int(known, 8)
    else:  # only as the last resort: to set it, even for a moment, is to set it for all threads
        umask = os.umask(0o077)
        os.umask(umask)
    return 0o666 if umask & 0o007 == 0o007 else 0o600


class _DirectWriter:
    """Writes large aligned memory with O_DIRECT, past the page cache, which costs training the least.

    Filling the cache takes several times the processor time of the write itself. Small or unaligned writes, and all
    writes on file systems without O_DIRECT, go through the cache.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self._can = hasattr(os, "O_DIRECT")
        self._is_direct = False

    def write(self, view: memoryview) -> int:
        length = len(view)
        while view:
            whole = len(view) // ALIGNMENT * ALIGNMENT
            self._switch(self._can and whole >= _LEAST_DIRECT and self._at % ALIGNMENT == 0 and _is_aligned(view))
            try:
                count = os.write(self._fd, view[:whole] if self._is_direct else view)
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._can = False
                continue
            self._at += count
            view = view[count:]
        return length

    def _switch(self, direct: bool) -> None:
        if direct == self._is_direct:
            return
        import fcntl

        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
            self._is_direct = direct
        except OSError:
            self._can = False


def _is_aligned(view: memoryview) -> bool:
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0


def _unlink(path: str, at: int | None) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path, dir_fd=at)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _sync(directory: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open one
        return
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
