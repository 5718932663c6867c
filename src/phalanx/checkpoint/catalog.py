"""The checkpoints of a storage: which exist, which are whole, and which were left unfinished. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.checkpoint.storage.base import Storage
from phalanx.checkpoint.storage.manifest import MANIFEST, Broken, Manifest, check_file, read_manifest
from phalanx.errors import CheckpointError

_CHECKPOINT = re.compile(r"step-(\d+)(?:\.[0-9a-f]+)?")
_TEMPORARY = re.compile(r"step-\d+(?:\.[0-9a-f]+)?\.(?:tmp|old)-[0-9a-f]+")


def check_name(directory: object) -> str:
    """Returns the name of a checkpoint's directory that another rank has sent, unless it is something else."""
    if not isinstance(directory, str) or not _CHECKPOINT.fullmatch(directory):
        raise CheckpointError(f"{directory!r} is no name of a checkpoint; the run's store has something else there.")
    return directory


@dataclass(frozen=True)
class Entry:
    """A directory with the name of a checkpoint."""

    step: int
    directory: str
    manifest: Manifest | None
    problem: str = ""
    """The reason why it is not whole, as far as the manifest and the sizes of the files show."""


class Catalog:
    """The checkpoints of one storage."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def entries(self) -> list[Entry]:
        """Returns all checkpoints, whole or not, newest first. Of two saves of one step the later one comes first."""
        found = [self.entry(name) for name in self.storage.directories() if _CHECKPOINT.fullmatch(name)]
        return sorted(found, key=lambda entry: (entry.step, entry.manifest.time if entry.manifest else 0), reverse=True)

    def entry(self, directory: str) -> Entry:
        match = _CHECKPOINT.fullmatch(directory)
        step = int(match[1]) if match else 0
        try:
            manifest = read_manifest(self.storage, directory)
            if manifest.step != step:
                raise Broken(f"{MANIFEST} is that of step {manifest.step}")
            return Entry(step, directory, manifest)
        except Broken as error:
            return Entry(step, directory, None, str(error))

    def whole(self) -> list[Entry]:
        """Returns one whole checkpoint for each step, newest first. Their files are not read."""
        first: dict[int, Entry] = {}
        for entry in self.entries():
            if entry.manifest is not None:
                first.setdefault(entry.step, entry)
        return list(first.values())

    def verify(self, entry: Entry, share: int = 0, shares: int = 1) -> str:
        """Reads its files, or one rank's share of them; returns what is wrong, or an empty string."""
        if entry.manifest is None:
            return entry.problem
        try:
            for name in sorted(entry.manifest.files)[share::shares]:
                check_file(self.storage, entry.directory, name, entry.manifest)
        except Broken as error:
            return str(error)
        return ""

    def leftovers(self, token: str = "") -> Iterator[str]:
        """Yields the directories of saves that were never finished, those with this token in their name."""
        for name in self.storage.directories():
            if token in name and (_TEMPORARY.fullmatch(name) or self._lacks_manifest(name)):
                yield name

    def _lacks_manifest(self, name: str) -> bool:
        return _CHECKPOINT.fullmatch(name) is not None and MANIFEST not in self.storage.sizes(name)

    def prune(self, keep: int | None, saved: str) -> None:
        """Removes other saves of the step that ``saved`` holds, and all but the newest ``keep`` whole checkpoints."""
        entries = self.entries()
        step = next(entry.step for entry in entries if entry.directory == saved)
        kept = sorted({entry.step for entry in entries if entry.manifest is not None}, reverse=True)[:keep]
        for entry in entries:
            is_duplicate = entry.step == step and entry.directory != saved
            if is_duplicate or entry.step < kept[-1]:
                self.storage.remove(entry.directory)
        self.storage.use_plain_name(saved)
