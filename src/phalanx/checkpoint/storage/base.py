"""Where checkpoints are kept: a directory of directories, on a disk or behind fsspec. No torch here."""

from __future__ import annotations

import errno
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO

from phalanx.errors import UsageError

PIECE = 1 << 22
"""Bytes read at a time: enough for the disk, little beside a model."""
_WRITTEN = 1 << 25
"""Bytes written at a time. They are in memory already, and each piece takes the interpreter's lock from training."""
ALIGNED = 4096
"""Where memory has to begin that a disk is written to from directly."""


@dataclass(frozen=True)
class Fact:
    """What a file has to be, to be the one that was written."""

    bytes: int
    crc32: int


class Summed:
    """A file that is being written, with its size and checksum so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.fact = Fact(0, 0)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for at in range(0, len(view), _WRITTEN):
            piece = view[at : at + _WRITTEN]
            self._file.write(piece)
            self.fact = Fact(self.fact.bytes + len(piece), zlib.crc32(piece, self.fact.crc32))


class Storage(ABC):
    """One kind of storage. A directory below it holds one checkpoint; names are single words."""

    path: str
    """As the user gave it."""

    @abstractmethod
    def directories(self) -> list[str]:
        """Names of what lies here, in no order; nothing if the place does not exist yet."""

    @abstractmethod
    def sizes(self, directory: str) -> dict[str, int]:
        """From the names of its files to their bytes."""

    @abstractmethod
    def open(self, directory: str, name: str) -> IO[bytes]:
        """For reading. OSError for what is no plain file, which might have no end."""

    @abstractmethod
    def create(self, directory: str, name: str) -> AbstractContextManager[IO[bytes]]:
        """For writing. At the end of the block the bytes are as durable as they get here."""

    @abstractmethod
    def make(self, directory: str) -> None:
        """Harmless if it is there already."""

    @abstractmethod
    def names_for(self, step: int, token: str) -> tuple[str, str]:
        """The directory in which step ``step`` is written, and the one in which it is found when it is whole."""

    @abstractmethod
    def publish(self, aside: str, final: str) -> None:
        """All files of ``aside`` are written, the manifest last: from here on the checkpoint is found as ``final``."""

    @abstractmethod
    def settle(self, final: str) -> None:
        """Nothing else has the step of ``final`` any more: it may have its plain name."""

    @abstractmethod
    def remove(self, directory: str) -> None:
        """At no moment does half of it look like a checkpoint."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """None where nobody can tell."""

    @abstractmethod
    def lock(self) -> Callable[[], None]:
        """Makes this process the only one that writes here, until what is returned is called; UsageError otherwise."""

    # ---- built from these

    def read(self, directory: str, name: str, most: int) -> bytes:
        """The whole file; OSError if it has more bytes than ``most``."""
        with self.open(directory, name) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return content

    def write(self, directory: str, name: str, content: bytes | memoryview) -> Fact:
        """Writes a whole file, as durable as it gets here."""
        with self.create(directory, name) as file:
            summed = Summed(file)
            summed.write(content)
        return summed.fact

    def fact(self, directory: str, name: str, most: int) -> Fact:
        """Reads the file from end to end, or until it has more bytes than ``most``."""
        size = crc = 0
        with self.open(directory, name) as file:
            while size <= most and (piece := file.read(PIECE)):
                size += len(piece)
                crc = zlib.crc32(piece, crc)
        return Fact(size, crc)

    def __str__(self) -> str:
        return self.path


def open_storage(path: str | os.PathLike[str], mode: int | None = None) -> Storage:
    """``/a/directory`` or ``scheme://…``, which fsspec and its plugins understand. ``mode`` is that of new files."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"the path of the checkpoints is {path!r}; give a directory, as a string or a pathlib.Path.")
    if not text:
        raise UsageError("the path of the checkpoints is empty; give a directory.")
    if "://" in text and not text.startswith("file://"):
        from phalanx.checkpoint.storage.fsspec import Remote

        return Remote(text)
    from phalanx.checkpoint.storage.local import Local

    return Local(text.removeprefix("file://"), mode)
