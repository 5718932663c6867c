"""The table of torch's names that phalanx replaces, and of its private names that phalanx reads.

Each is one `Name` in the file of its area of torch; docs/torch-internals.md is generated from `by_area`. A name that is
missing in another version of torch turns off the feature that needs it, with a line in the rank's event file; it raises
nothing. Importing a file of this package imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.torch_compat import OLDEST, release

EVENT = "feature off"
_missing: dict[Name, dict[str, str]] = {}
"""The missing names, with their events: a forked worker finds them before it has an event file."""
_events: tuple[Path, int] | None = None
"""The run directory and the rank."""


@dataclass(eq=False)
class Name:
    """A name of torch, its purpose, and what is lost in a torch without it."""

    path: str
    """``module:attribute.attribute``, or a module alone, which is found but not imported."""
    purpose: str
    lost: str
    since: tuple[int, int] | None = OLDEST
    """The oldest version of torch in which it was seen; in older ones its absence is no event.

    None: only a torch for GPUs has it, and none was tested.
    """

    def __str__(self) -> str:
        return self.path.replace(":", ".")

    @property
    def attribute(self) -> str:
        return self.path.rpartition(":")[2].rpartition(".")[2]

    def get(self) -> Any:
        """Returns the object with this name; None when this torch does not have it."""
        try:
            found = getattr(*_place(self.path)) if ":" in self.path else importlib.util.find_spec(self.path)
        except (ImportError, AttributeError):
            found = None
        if found is None:
            self.turn_off("there is no such name")
        return found

    def if_loaded(self) -> Any:
        """Returns the same as `get`, but None as long as its module is not imported."""
        return self.get() if self.path.partition(":")[0] in sys.modules else None

    def of(self, owner: object, default: object = None) -> Any:
        """Returns this attribute of an object, or the default, without an event."""
        return getattr(owner, self.attribute, default)

    def needed_of(self, owner: object, default: object = None) -> Any:
        """Returns the same of an object that has it in every known version of torch."""
        if not hasattr(owner, self.attribute):
            self.turn_off("there is no such attribute")
        return self.of(owner, default)

    def turn_off(self, why: str) -> None:
        """Writes an event, once per process, that its feature is off."""
        if self not in _missing and release() >= (self.since or OLDEST):
            torch = sys.modules["torch"].__version__
            _missing[self] = {"lost": self.lost, "name": str(self), "why": why, "torch": torch}
            _write([self])


@dataclass(eq=False)
class Replaced(Name):
    """A name that a feature replaces."""

    also: tuple[str, ...] = ()
    """Other modules with the same object under the same name; it is replaced there too."""

    def wrap(self, make: Callable[[Any], object]) -> Patch | None:
        """Replaces the object by ``make(object)``. Returns None when that is not possible."""
        plain = self.get()
        if plain is None:
            return None
        try:
            paths = (self.path, *(f"{module}:{self.attribute}" for module in self.also))
            patch = Patch(tuple(map(_place, paths)), plain, make(plain))
            patch.set(patch.wrapped)
        except Exception as error:  # noqa: BLE001 (a change in torch must not end a run)
            self.turn_off(f"{type(error).__name__}: {error}")
            return None
        return patch


def by_area() -> dict[str, list[Name]]:
    """Returns all names, by the file that they are in."""
    found: dict[str, list[Name]] = {}
    seen: set[Name] = set()  # a file may import names of another
    for module in pkgutil.iter_modules(sys.modules[str(__package__)].__path__):
        there = vars(importlib.import_module(f"{__package__}.{module.name}")).values()
        names = [each for each in there if isinstance(each, Name) and each not in seen]
        seen.update(names)
        if names:
            found[module.name] = names
    return found


def _place(path: str) -> tuple[object, str]:
    """Returns the owner of a name, and the attribute in it."""
    module, _, names = path.partition(":")
    *owners, attribute = names.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), attribute


@dataclass(frozen=True)
class Patch:
    """A replacement that is in place."""

    places: tuple[tuple[object, str], ...]
    plain: object
    wrapped: object

    def set(self, value: object) -> None:
        for owner, attribute in self.places:
            setattr(owner, attribute, value)

    def undo(self) -> bool:
        """Restores torch's own object. Returns False, and leaves ours in use, if a later patch is above it."""
        if any(getattr(*place) is not self.wrapped for place in self.places):
            return False
        self.set(self.plain)
        return True


def report_to(run_directory: Path, rank: int) -> None:
    """Gives this rank an event file: for the names found missing before, and later."""
    global _events
    _events = run_directory, rank
    _write(list(_missing))


def _write(names: list[Name]) -> None:
    if _events is None or not names:
        return
    from phalanx.events import rank_events_path  # imported only when there is something to write
    from phalanx.run_files import EventLog

    with contextlib.suppress(OSError, PhalanxError):  # the run directory has no space for it
        log = EventLog(rank_events_path(*_events))
        for name in names:
            log.write(EVENT, **_missing[name])
        log.close()
