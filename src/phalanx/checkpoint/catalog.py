"""The checkpoints of one place: which there are, which are whole, which were left behind. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.checkpoint.storage.base import Storage
from phalanx.checkpoint.storage.manifest import MANIFEST, Broken, Manifest, check_file, read_manifest
from phalanx.errors import CheckpointError

_CHECKPOINT = re.compile(r"step-(\d+)(?:\.[0-9a-f]+)?")
_ASIDE = re.compile(r"step-\d+(?:\.[0-9a-f]+)?\.(?:tmp|old)-[0-9a-f]+")


def check_name(directory: Any) -> str:
    """The name of a checkpoint's directory, as another rank has told it: never a path that leads elsewhere."""
    if not isinstance(directory, str) or not _CHECKPOINT.fullmatch(directory):
        raise CheckpointError(f"{directory!r} is no name of a checkpoint; the run's store has something else there.")
    return directory


@dataclass(frozen=True)
class Entry:
    """A directory that has the name of a checkpoint."""

    step: int
    directory: str
    manifest: Manifest | None
    problem: str = ""
    """Why it is not whole, as far as that can be seen without reading its files."""


class Catalog:
    """A place, read as checkpoints."""

    def __init__(self, place: Storage) -> None:
        self.place = place

    def entries(self) -> list[Entry]:
        """All, whole or not, newest first. Of two saves of one step the later one comes first."""
        found = []
        for name in self.place.directories():
            if (match := _CHECKPOINT.fullmatch(name)) is not None:
                found.append(self._entry(name, int(match[1])))
        return sorted(found, key=lambda entry: (entry.step, entry.manifest.time if entry.manifest else 0), reverse=True)

    def entry(self, directory: str) -> Entry:
        """The one of that name."""
        match = _CHECKPOINT.fullmatch(directory)
        return self._entry(directory, int(match[1]) if match else 0)

    def _entry(self, directory: str, step: int) -> Entry:
        try:
            manifest = read_manifest(self.place, directory)
            if manifest.step != step:
                raise Broken(f"{MANIFEST} is that of step {manifest.step}")
            return Entry(step, directory, manifest)
        except Broken as error:
            return Entry(step, directory, None, str(error))

    def whole(self) -> list[Entry]:
        """One for each step, newest first, as far as that can be seen without reading their files."""
        first: dict[int, Entry] = {}
        for entry in self.entries():
            if entry.manifest is not None:
                first.setdefault(entry.step, entry)
        return list(first.values())

    def verify(self, entry: Entry, share: int = 0, shares: int = 1) -> str:
        """Reads its files, or one rank's share of them; what is wrong, or nothing."""
        if entry.manifest is None:
            return entry.problem
        try:
            for name in sorted(entry.manifest.files)[share::shares]:
                check_file(self.place, entry.directory, name, entry.manifest)
        except Broken as error:
            return str(error)
        return ""

    def leftovers(self, are_meant: Callable[[str], bool]) -> Iterator[str]:
        """Directories of saves that were never finished, those whose name is meant."""
        for name in self.place.directories():
            is_aside = _ASIDE.fullmatch(name) is not None
            if are_meant(name) and (is_aside or (_CHECKPOINT.fullmatch(name) and not self._has_manifest(name))):
                yield name

    def _has_manifest(self, directory: str) -> bool:
        return MANIFEST in self.place.sizes(directory)

    def prune(self, keep: int | None, saved: str) -> None:
        """Removes what ``saved``, the directory that has just become whole, makes superfluous.

        That is any other save of its step, and whatever is older than the newest ``keep`` whole ones.
        """
        entries = self.entries()
        step = next(entry.step for entry in entries if entry.directory == saved)
        kept = sorted({entry.step for entry in entries if entry.manifest is not None}, reverse=True)[:keep]
        for entry in entries:
            is_double = entry.step == step and entry.directory != saved
            if is_double or entry.step < kept[-1]:
                self.place.remove(entry.directory)
        self.place.settle(saved)
