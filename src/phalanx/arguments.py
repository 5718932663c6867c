"""The hallway: argparse that says its errors as phalanx does, for every command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NoReturn

from phalanx.errors import UsageError


class Parser(argparse.ArgumentParser):
    """One sentence about the mistake, a guess at the flag that was meant, and where the flags are listed."""

    habits: Mapping[str, str] = {}
    """What other programs call some of the flags, and what they are called here."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. {self._meant(message)}`{self.prog} --help` lists the flags.")

    def _meant(self, message: str) -> str:
        """A guess at the flag that somebody had in mind."""
        problem, _, unknown = message.partition(": ")
        if problem != "unrecognized arguments" or not unknown:
            return ""
        import difflib  # for a mistake only

        written = unknown.split()[0].split("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--") and "_" not in name]
        begun = [name for name in known if written.startswith("--") and name.startswith(written)]
        found = [*filter(None, [self.habits.get(written)]), *begun, *difflib.get_close_matches(written, known, 1, 0.7)]
        return f"Is {found[0]} meant? " if found else ""
