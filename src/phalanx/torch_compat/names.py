"""The names of torch that phalanx reads though they are private, or replaced, whether private or not.

Each is one `Name` in the file of its area of torch. `by_area` is the table of them, and docs/torch-internals.md is made
of it.
A name that is not there in another version of torch turns off what depends on it: a line in the rank's event file says
so, and nothing is raised. Importing this, or any file of this package, imports no torch.
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
"""With what is written of each. A forked worker has no torch yet when it begins."""
_events: tuple[Path, int] | None = None
"""The run directory and the rank."""


@dataclass(eq=False)
class Name:
    """A name of torch: what it is for, and what is lost in a torch that does not have it."""

    path: str
    """``module:attribute.attribute``, or a module alone, which is then looked for and not imported."""
    purpose: str
    lost: str
    since: tuple[int, int] | None = OLDEST
    """The oldest version of torch in which it has been seen. Before it, its absence is no event.

    None: only a torch for GPUs has it, and none was at hand.
    """

    def __str__(self) -> str:
        return self.path.replace(":", ".")

    @property
    def attribute(self) -> str:
        return self.path.rpartition(":")[2].rpartition(".")[2]

    def get(self) -> Any:
        """What it stands for; None when this torch does not have it."""
        try:
            found = getattr(*_place(self.path)) if ":" in self.path else importlib.util.find_spec(self.path)
        except (ImportError, AttributeError):
            found = None
        if found is None:
            self.turn_off("there is no such name")
        return found

    def if_loaded(self) -> Any:
        """The same, and None as long as nobody has imported its module."""
        return self.get() if self.path.partition(":")[0] in sys.modules else None

    def of(self, owner: Any, default: Any = None) -> Any:
        """This attribute of one object; the default for an object without it, which is no event."""
        return getattr(owner, self.attribute, default)

    def needed_of(self, owner: Any, default: Any = None) -> Any:
        """The same of an object that has it in every version of torch that is known."""
        if not hasattr(owner, self.attribute):
            self.turn_off("there is no such attribute")
        return self.of(owner, default)

    def turn_off(self, why: str) -> None:
        """Notes once in a process that what depends on it is off."""
        if self not in _missing and release() >= (self.since or OLDEST):
            torch = sys.modules["torch"].__version__
            _missing[self] = {"lost": self.lost, "name": str(self), "why": why, "torch": torch}
            _write([self])


@dataclass(eq=False)
class Replaced(Name):
    """A name that is replaced, by what a feature makes of it."""

    also: tuple[str, ...] = ()
    """Other modules that have the same object under the same name; a replacement goes there too."""

    def wrap(self, make: Callable[[Any], Any]) -> Patch | None:
        """Puts ``make(what it stands for)`` in its place; None when that cannot be done."""
        plain = self.get()
        if plain is None:
            return None
        try:
            paths = (self.path, *(f"{module}:{self.attribute}" for module in self.also))
            patch = Patch(tuple(map(_place, paths)), plain, make(plain))
            patch.set(patch.wrapped)
        except Exception as error:  # noqa: BLE001 (whatever has changed in torch must not end a run)
            self.turn_off(f"{type(error).__name__}: {error}")
            return None
        return patch


def by_area() -> dict[str, list[Name]]:
    """The table: all names, by the file that they are in."""
    found: dict[str, list[Name]] = {}
    seen: set[Name] = set()  # a file may use those of another
    for module in pkgutil.iter_modules(sys.modules[str(__package__)].__path__):
        there = vars(importlib.import_module(f"{__package__}.{module.name}")).values()
        names = [each for each in there if isinstance(each, Name) and each not in seen]
        seen.update(names)
        if names:
            found[module.name] = names
    return found


def _place(path: str) -> tuple[Any, str]:
    """Where it stands, and under which name there."""
    module, _, names = path.partition(":")
    *owners, attribute = names.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), attribute


@dataclass(frozen=True)
class Patch:
    """A replacement that is in place."""

    places: tuple[tuple[Any, str], ...]
    plain: Any
    wrapped: Any

    def set(self, value: Any) -> None:
        for owner, attribute in self.places:
            setattr(owner, attribute, value)

    def undo(self) -> bool:
        """Restores torch's own; False when something else has replaced ours since, which stays in use then."""
        if any(getattr(*place) is not self.wrapped for place in self.places):
            return False
        self.set(self.plain)
        return True


def report_to(run_directory: Path, rank: int) -> None:
    """This process is a rank with an event file: it gets what was missing before, and what will be."""
    global _events
    _events = run_directory, rank
    _write(list(_missing))


def _write(names: list[Name]) -> None:
    if _events is None or not names:
        return
    from phalanx.events import EventLog, rank_events_path  # a rank imports it only when there is something to write

    with contextlib.suppress(OSError, PhalanxError):  # no place for it in the run directory
        log = EventLog(rank_events_path(*_events))
        for name in names:
            log.write(EVENT, **_missing[name])
        log.close()
