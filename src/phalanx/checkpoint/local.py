"""Checkpoints on a disk: written aside, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from phalanx.checkpoint.place import Place
from phalanx.errors import UsageError

_LOCK = ".writer"
_UNABLE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What a file system without locks answers."""


class Local(Place):
    """A directory, on a disk that all ranks share."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._root = Path(path).expanduser().absolute()

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
        return {entry.name: entry.stat().st_size for entry in os.scandir(self._root / directory)}

    def open(self, directory: str, name: str) -> IO[bytes]:
        return (self._root / directory / name).open("rb")

    @contextlib.contextmanager
    def create(self, directory: str, name: str) -> Iterator[IO[bytes]]:
        with (self._root / directory / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def make(self, directory: str) -> None:
        (self._root / directory).mkdir(parents=True, exist_ok=True)

    def rename_file(self, directory: str, name: str, to: str) -> None:
        (self._root / directory / name).rename(self._root / directory / to)

    def names_for(self, step: int, token: str) -> tuple[str, str]:
        # A step that is there already keeps its name until the new one is whole: there is no moment with neither.
        is_taken = (self._root / f"step-{step}").exists()
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
        """A record lock: it ends with the process, however that ends, and no child inherits it. Windows has none."""
        try:
            import fcntl
        except ImportError:
            return lambda: None
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._root / _LOCK
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
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
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on host {socket.gethostname()}".encode(), 0)
        return lambda: _unlock(fd, path)


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
