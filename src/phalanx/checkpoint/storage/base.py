"""The interface of a storage: a directory of checkpoints, on a disk or behind fsspec. No torch here."""

from __future__ import annotations

import errno
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import IO, Annotated

from msgspec import Meta

from phalanx.errors import UsageError
from phalanx.messages import Record

_READ_BYTES = 1 << 22
"""Bytes read at a time: enough for the disk, little beside a model."""
_WRITE_BYTES = 1 << 25
"""Bytes written at a time. They are in memory already, and each write takes the interpreter's lock from training."""
ALIGNMENT = 4096
"""Memory that begins at a multiple of this can be written to a disk directly."""
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
"""A number of bytes or rows."""


class Checksum(Record, frozen=True):
    """The size and checksum of a file, as it was written."""

    bytes: Count
    crc32: Annotated[int, Meta(ge=0, lt=1 << 32)]


class Storage(ABC):
    """One kind of storage. Each directory in it holds one checkpoint; names have no slashes."""

    path: str
    """The path as the user gave it."""

    @abstractmethod
    def directories(self) -> list[str]:
        """Returns the names of all directories, in any order; none if the storage does not exist yet."""

    @abstractmethod
    def sizes(self, directory: str) -> dict[str, int]:
        """Returns the size of each file in bytes, by name."""

    @abstractmethod
    def open(self, directory: str, name: str) -> IO[bytes]:
        """Opens a file for reading. OSError for anything but a plain file, which might have no end."""

    @abstractmethod
    def create(self, directory: str, name: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a new file for writing. At the end of the block its bytes are as durable as they get here."""

    @abstractmethod
    def make_directory(self, directory: str) -> None:
        """Creates a directory, unless it exists."""

    @abstractmethod
    def names_for(self, step: int, token: str) -> tuple[str, str]:
        """Returns the directory in which a step is written, and the one in which the whole checkpoint is found."""

    @abstractmethod
    def publish(self, temporary: str, final: str) -> None:
        """Makes a directory whose files are all written, the manifest last, visible as the checkpoint ``final``."""

    @abstractmethod
    def use_plain_name(self, final: str) -> None:
        """Renames ``final`` to ``step-N``, once no other directory holds that step."""

    @abstractmethod
    def remove(self, directory: str) -> None:
        """Removes a directory. At no moment does half of it look like a checkpoint."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Returns the free space, or None if it is unknown."""

    @abstractmethod
    def lock(self) -> Callable[[], None]:
        """Makes this process the only writer until the returned function is called; UsageError if there is another."""

    def read(self, directory: str, name: str, most: int) -> bytes:
        """Returns the content of a file; OSError if it has more than ``most`` bytes."""
        with self.open(directory, name) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return content

    def write(self, directory: str, name: str, content: bytes | memoryview) -> Checksum:
        """Writes a whole file."""
        view, crc = memoryview(content), 0
        with self.create(directory, name) as file:
            for begin in range(0, len(view), _WRITE_BYTES):
                block = view[begin : begin + _WRITE_BYTES]
                file.write(block)
                crc = zlib.crc32(block, crc)
        return Checksum(len(view), crc)

    def checksum(self, directory: str, name: str, most: int) -> Checksum:
        """Reads a file to its end, or until it has more than ``most`` bytes."""
        size = crc = 0
        with self.open(directory, name) as file:
            while size <= most and (block := file.read(_READ_BYTES)):
                size += len(block)
                crc = zlib.crc32(block, crc)
        return Checksum(size, crc)

    def __str__(self) -> str:
        return self.path


def open_storage(path: str | os.PathLike[str], mode: int | None = None) -> Storage:
    """Opens ``/a/directory``, or ``scheme://…`` with fsspec and its plugins. ``mode`` is that of new files."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"the path of the checkpoints is {path!r}; give a directory, as a string or a pathlib.Path.")
    if not text:
        raise UsageError("the path of the checkpoints is empty; give a directory.")
    if "://" in text and not text.startswith("file://"):
        from phalanx.checkpoint.storage.fsspec import FsspecStorage

        return FsspecStorage(text)
    from phalanx.checkpoint.storage.local import LocalStorage

    return LocalStorage(text.removeprefix("file://"), mode)
