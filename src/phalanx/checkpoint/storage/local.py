"""Checkpoints on a disk: written aside, synced, renamed."""

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
from phalanx.checkpoint.storage.base import ALIGNED, Storage
from phalanx.errors import UsageError
from phalanx.system import procfs

_LOCK = ".writer"
_UNABLE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What a file system without locks answers."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Windows has neither."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | _NO_LINK
_LEAST_DIRECT = 1 << 20
_locked: dict[tuple[int, int, int], Storage] = {}
"""By process, device and inode: the roots that this process writes to. A record lock is that of the whole process, and
is lost when any file descriptor of its file is closed."""


class Local(Storage):
    """A directory, on a disk that all ranks share."""

    def __init__(self, path: str, mode: int | None = None) -> None:
        self.path = path
        self._root = Path(path).expanduser().absolute()
        self._is_told = mode is not None
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
        with self._own(directory) as at:
            path = name if at is not None else os.fspath(self._root / directory / name)
            _unlink(path, at)  # of a save that failed, and could not be removed
            fd = os.open(path, _CREATE, self._mode, dir_fd=at)
            try:
                if self._is_told:  # whatever the umask is
                    os.chmod(fd if os.chmod in os.supports_fd else path, self._mode)  # noqa: PTH101 (follows no link)
                yield cast(IO[bytes], _Direct(fd))
                os.fsync(fd)
            except BaseException:
                _unlink(path, at)  # a full disk has room again for what is said about it
                raise
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def _own(self, directory: str) -> Iterator[int | None]:
        """The directory of a save. All ranks are one user; anybody else who can write to the path, which a team may
        share, could have put a link there that leads elsewhere. None where files are not opened from a directory."""
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

    def make(self, directory: str) -> None:
        self._make(self._root)
        self._make(self._root / directory)

    def _make(self, directory: Path) -> None:
        """Who may read a file may list its directory. Harmless if that is there already."""
        mode = self._mode | (self._mode & 0o444) >> 2
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode)
            if self._is_told:
                with self._own(os.fspath(directory)) as at:
                    os.chmod(directory if at is None else at, mode)  # noqa: PTH101 (follows no link)

    def names_for(self, step: int, token: str) -> tuple[str, str]:
        # A step that is there already keeps its name until the new one is whole: there is no moment with neither.
        is_taken = os.path.lexists(self._root / f"step-{step}")
        return f"step-{step}.tmp-{token}", f"step-{step}.{token}" if is_taken else f"step-{step}"

    def publish(self, aside: str, final: str) -> None:
        # The names inside have to be on the disk before the name of the whole is.
        _sync(self._root / aside)
        (self._root / aside).rename(self._root / final)
        _sync(self._root)

    def settle(self, final: str) -> None:
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
        """A record lock: it ends with the process, however that ends, and no child inherits it. Windows has none."""
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
                if error.errno in _UNABLE:
                    return lambda: None
                raise UsageError(
                    f"checkpoints in {self.path} are being written by {owner or 'another run'}; "
                    "give this run another path, or end that one."
                ) from None
            if _is_at(fd, path):
                break
            os.close(fd)  # its owner has just removed it
        if self._is_told:
            os.fchmod(fd, self._mode)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on host {socket.gethostname()}".encode(), 0)
        return lambda: _unlock(fd, path)


def _default_mode() -> int:
    """For the owner alone, unless the user's umask was made for a group: one that shuts out all others."""
    return 0o666 if _umask() & 0o007 == 0o007 else 0o600


def _umask() -> int:
    """To set it, even for a moment, is to set it for all threads; so that is done only where nothing else shows it."""
    known = procfs.status("self").get("Umask")
    if known is not None:
        return int(known, 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


class _Direct:
    """Writes large aligned memory past the page cache, which costs training the least.

    Filling the cache takes several times the processor time of the write itself. What is small or not aligned, and
    everything on file systems that cannot do it, goes through the cache.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self._can = hasattr(os, "O_DIRECT")
        self._is_direct = False

    def write(self, view: memoryview) -> int:
        length = len(view)
        while view:
            whole = len(view) // ALIGNED * ALIGNED
            self._switch(self._can and whole >= _LEAST_DIRECT and self._at % ALIGNED == 0 and _is_aligned(view))
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
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNED == 0


def _unlink(path: str, at: int | None) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path, dir_fd=at)


def _unlock(fd: int, path: Path) -> None:
    path.unlink(missing_ok=True)
    os.close(fd)


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
