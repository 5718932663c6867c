"""Checks of the arguments of commands and functions; a wrong one is an error of one sentence that names it."""

from __future__ import annotations

import argparse
import operator
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from phalanx.errors import UsageError

if TYPE_CHECKING:
    import torch

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def whole_number(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Returns ``value`` as an int; numpy's and torch's whole numbers are taken too."""
    try:
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise UsageError(f"{name} is {shown(value)}; give a whole number.") from None
    if (least is not None and number < least) or (most is not None and number > most):
        allowed = f"from {least} to {most}" if most is not None else f"{least} or more"
        raise UsageError(f"{name} is {number}; give {allowed}.")
    return number


def seconds(name: str, value: float | timedelta | None) -> float | None:
    """Returns a time to wait in seconds, more than 0; None stays None."""
    if value is None:
        return None
    given = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1e9:  # nan is not either
        raise UsageError(f"{name} is {shown(value)}; give seconds, more than 0, or a timedelta.")
    return float(given)


def duration(text: str) -> float | None:
    """Returns the seconds of a time like "90s", "10min", "3h50m", or in SLURM's form; None for anything else.

    SLURM reads "50:00" as minutes and seconds, and "1-12:00" as a day and hours.
    """
    clock = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)", text.strip())
    if clock is not None:
        days, first, second, third = (int(part or 0) for part in clock.groups())
        hours, minutes, seconds = (second, third, 0) if clock[1] and not clock[2] else (first, second, third)
        return 86400.0 * days + 3600 * hours + 60 * minutes + seconds
    parts = re.findall(r"([0-9]*\.?[0-9]+) ?(s|sec|min|m|h|d)(?![a-z])", text.strip())
    if not parts or "".join("".join(part) for part in parts) != text.replace(" ", ""):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def device(value: str | int | torch.device) -> torch.device:
    """Returns the device; everything that `torch.device` takes is taken."""
    import torch

    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise UsageError(
            f"device {shown(value)} is unknown to torch; give cpu, cuda, cuda:N or another accelerator."
        ) from None


def shown(value: object) -> str:
    """A value for an error message: its repr, or only its type if that is long or fails."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 (whatever its __repr__ does, the error is about something else)
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, a guess at the flag that was meant, and where the flags are listed."""

    habits: Mapping[str, str] = {}
    """Names of flags in other programs, and their names here."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        # Python 3.11 would make an empty list of `--flag=--`.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return super()._get_values(action, arg_strings)  # pyright: ignore[reportAttributeAccessIssue]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. {self._meant(message)}`{self.prog} --help` lists the flags.")

    def _meant(self, message: str) -> str:
        """A guess at the flag that was meant."""
        problem, _, unknown = message.partition(": ")
        if problem != "unrecognized arguments" or not unknown:
            return ""
        import difflib  # for a mistake only

        written = unknown.split()[0].split("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--") and "_" not in name]
        begun = [name for name in known if written.startswith("--") and name.startswith(written)]
        found = [*filter(None, [self.habits.get(written)]), *begun, *difflib.get_close_matches(written, known, 1, 0.7)]
        return f"Is {found[0]} meant? " if found else ""
