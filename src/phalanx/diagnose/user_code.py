"""Which source files are the user's: not torch's, phalanx's, the standard library's or another package's."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from phalanx.status.code_lines import installed_package

# A rank may run under another interpreter than we do, so its library is known by the look of its path as well.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3\.\d+/")
_PHALANX = str(Path(__file__).parents[1]) + os.sep
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def is_phalanx(file: str) -> bool:
    return file.startswith(_PHALANX)


def is_users(file: str, program: str = "") -> bool:
    """``program``: the installed package that the program lives in, which counts as the user's."""
    if is_phalanx(file) or file.startswith("<"):
        return False
    if program and file.startswith(program):
        return True
    return _LIBRARY.search(file) is None and not file.startswith(_STANDARD)


def program_of(files: Iterable[str]) -> str:
    """The installed package that the program of a stack lives in. ``files``: of its lines, outermost first."""
    for file in files:
        if not (is_phalanx(file) or file.startswith("<") or file.endswith("/runpy.py")):
            return installed_package(file)
    return ""
