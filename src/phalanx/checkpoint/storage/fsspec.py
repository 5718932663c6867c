"""Checkpoints behind fsspec (memory://, s3://, …). Such stores cannot rename: writing the manifest publishes them."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import IO

from phalanx.checkpoint.storage.base import Storage
from phalanx.checkpoint.storage.manifest import MANIFEST
from phalanx.errors import UsageError


class FsspecStorage(Storage):
    """A URL. Each save has a directory of its own name, so that no two mix their files."""

    def __init__(self, path: str) -> None:
        import fsspec

        self.path = path
        try:
            # Cached listings would hide what other ranks have written.
            fs, root = fsspec.core.url_to_fs(path, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise UsageError(f"{path} cannot be opened: {error}") from None
        self._fs = fs
        self._root = root.rstrip("/")

    def _at(self, *names: str) -> str:
        return posixpath.join(self._root, *names)

    def directories(self) -> list[str]:
        try:
            found = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [posixpath.basename(entry["name"].rstrip("/")) for entry in found if entry["type"] == "directory"]

    def sizes(self, directory: str) -> dict[str, int]:
        found = self._fs.ls(self._at(directory), detail=True)
        return {posixpath.basename(entry["name"]): entry["size"] for entry in found if entry["type"] == "file"}

    def open(self, directory: str, name: str) -> IO[bytes]:
        return self._fs.open(self._at(directory, name), "rb")

    def create(self, directory: str, name: str) -> AbstractContextManager[IO[bytes]]:
        return self._fs.open(self._at(directory, name), "wb")

    def make_directory(self, directory: str) -> None:
        self._fs.makedirs(self._at(directory), exist_ok=True)

    def names_for(self, step: int, token: str) -> tuple[str, str]:
        name = f"step-{step}.{token}"
        return name, name

    def publish(self, temporary: str, final: str) -> None:
        """Does nothing: the manifest, which was written last, has published it."""

    def use_plain_name(self, final: str) -> None:
        """Does nothing: here, to rename is to copy."""

    def remove(self, directory: str) -> None:
        manifest = self._at(directory, MANIFEST)
        if self._fs.exists(manifest):
            self._fs.rm_file(manifest)
        self._fs.rm(self._at(directory), recursive=True)

    def free_bytes(self) -> int | None:
        return None

    def lock(self) -> Callable[[], None]:
        """Locks nothing: here the user sees to it that only one run writes."""
        return lambda: None
