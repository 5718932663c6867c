"""The run directory and its files, opened safely wherever it is and whoever else can write there.

A directory of runs may belong to somebody else, or be open to all. So nothing is opened by its whole path: the run
directory is opened first, it has to be this user's and no link, and its files are opened from there, never through a
link. Readers look at other users' directories as well; they follow no link, and wait for no pipe.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.errors import LaunchError

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_LINK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
_OTHERS = "it belongs to another user (uid {}), who can replace what is written there"
MOST_BYTES = 256 << 20
"""The largest file that is read whole: far more than any run writes, and harmless to memory whoever wrote it."""


def open_file(path: Path, flags: int, directory: Path | None = None) -> int:
    """Opens a file for this user alone; with O_CREAT the directories on the way are made, should they be missing.

    ``directory``: the run directory, if that is not the file's own.
    """
    directory = path.parent if directory is None else directory
    *parents, name = path.relative_to(directory).parts
    if flags & os.O_CREAT:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it meanwhile
    with contextlib.ExitStack() as stack:
        at = stack.enter_context(_opened(directory))
        for parent in parents:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, 0o700, dir_fd=at)
            at = os.open(parent, _DIRECTORY | _NO_LINK, dir_fd=at)
            stack.callback(os.close, at)
        return os.open(name, flags | _NO_LINK, 0o600, dir_fd=at)


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all: aside, then renamed."""
    aside = f".{path.name}-{os.getpid()}"
    with _opened(path.parent) as at:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=at)  # left by a process that was killed and had this pid
        fd = os.open(aside, _NEW, 0o600, dir_fd=at)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(text)
            os.replace(aside, path.name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            os.unlink(aside, dir_fd=at)
            raise


def remove(path: Path) -> None:
    """Removes a file of a run directory, if it is there."""
    with _opened(path.parent) as at, contextlib.suppress(FileNotFoundError):
        os.unlink(path.name, dir_fd=at)


def open_own(directory: Path) -> int:
    """Opens a directory, which has to be this user's and no link."""
    at = os.open(directory, _DIRECTORY | _NO_LINK)
    if _is_own(at):
        return at
    owner = os.fstat(at).st_uid
    os.close(at)
    raise PermissionError(errno.EPERM, _OTHERS.format(owner), str(directory))


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    at = open_own(directory)
    try:
        yield at
    finally:
        os.close(at)


def open_to_read(path: Path, flags: int = 0) -> int:
    """Opens a plain file; raises OSError for everything else."""
    try:
        fd = os.open(path, _READ | flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link, and none is followed here", str(path)) from None
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no plain file", str(path))


def read(path: Path, begin: int = 0, most: int | None = None) -> bytes:
    """The content of a plain file from ``begin`` on, or ``most`` bytes of it; OSError if all is above MOST_BYTES."""
    with os.fdopen(open_to_read(path), "rb", buffering=0) as file:
        if most is None and os.fstat(file.fileno()).st_size - begin > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES >> 20} MiB", str(path))
        file.seek(begin)
        return file.read(MOST_BYTES if most is None else most) or b""


# ---- a new run directory


def new_run_id() -> str:
    """A name that sorts by time: date, time and the agent's pid."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def new_run_directory(base: Path, run_id: str) -> Path:
    """Makes ``base/run_id`` for this user alone; ``base/latest`` points at it."""
    try:
        at = _open_base(base)
        try:
            if not os.listdir(at):  # noqa: PTH208
                _ignore_for_git(at)
            name = _first_free(at, run_id)
            _link_latest(at, name)
        finally:
            os.close(at)
    except OSError as error:
        raise LaunchError(
            f"cannot write the run directory {base / run_id}: {error.strerror}. Give another directory with --log-dir."
        ) from None
    return (base / name).absolute()


def _open_base(base: Path) -> int:
    """Opens the directory of all runs, made if it is missing. One of another user, who could replace what is written
    there, is refused; in one like /tmp, with the sticky bit, nobody else can.

    One of root or of this user that all can write to is taken: volumes of Kubernetes and mounts of WSL are like that.
    Moving a run directory there gains an attacker nothing, since its files are opened from its own descriptor.
    """
    base.mkdir(mode=0o755, parents=True, exist_ok=True)
    at = os.open(base, _DIRECTORY)
    found = os.fstat(at)
    if found.st_uid == 0 or found.st_mode & stat.S_ISVTX or _is_own(at):
        return at
    os.close(at)
    raise PermissionError(errno.EPERM, _OTHERS.format(found.st_uid), str(base))


def _ignore_for_git(base: int) -> None:
    with (
        contextlib.suppress(FileExistsError),  # another run has begun at the same moment
        os.fdopen(os.open(".gitignore", _NEW, 0o666, dir_fd=base), "w") as file,
    ):
        file.write("*\n")


def _first_free(base: int, run_id: str) -> str:
    """Makes the directory. Two containers may share the base and have the same pid in the same second."""
    for name in itertools.chain([run_id], (f"{run_id}-{number}" for number in range(1, 10_000))):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=base)
            return name
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), run_id)


def _link_latest(base: int, name: str) -> None:
    """Makes the link ``latest``, in place of an older one, or none where that is not possible."""
    aside = f".latest-{os.getpid()}"
    with contextlib.suppress(OSError):  # another user's, or a file system without links
        os.symlink(name, aside, dir_fd=base)
        try:
            os.replace(aside, "latest", src_dir_fd=base, dst_dir_fd=base)
        except OSError:
            os.unlink(aside, dir_fd=base)


def _is_own(at: int) -> bool:
    """Some file systems give all that root writes to another user, so a new file shows which user we are there."""
    owner = os.fstat(at).st_uid
    if owner == os.geteuid():
        return True
    name = f".owner-{os.urandom(8).hex()}"
    try:
        fd = os.open(name, _NEW, 0o600, dir_fd=at)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_uid == owner
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=at)


class EventLog:
    """Appends events as JSON lines. Each line is one write, so a reader never sees half of one.

    A full disk ends the file, not the run. While its writer lives, the file is locked, which readers check.
    """

    def __init__(self, path: Path) -> None:
        import fcntl

        self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, event: str, **fields: object) -> None:
        from phalanx import messages  # a rank imports nothing foreign before its script

        line = messages.encode({"time": time.time(), "event": event, **fields})
        with contextlib.suppress(OSError):
            os.write(self._fd, line + b"\n")

    def close(self) -> None:
        os.close(self._fd)
