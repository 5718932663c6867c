"""Lines of source files: which are the user's, their text, and how they are printed."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.events import Ending, Frame

PACKAGE_ROOT = str(Path(__file__).parent) + os.sep
"""The beginning of the paths of phalanx's own files. Every path that lies in the package is computed from it."""
SYS_PATH_ENTRY = os.path.dirname(PACKAGE_ROOT[:-1])  # noqa: PTH120
"""The entry that sys.path needs for this phalanx to be imported."""
LAUNCHER = f"{PACKAGE_ROOT}launch{os.sep}"
STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
WIDTH = 160
IN_ANOTHER_PROCESS = re.compile(r"Caught \S+ in (?P<where>.+)\.\n")
"""The beginning of a message of torch that holds the traceback of another process."""

# A rank may run under another interpreter than we do, so its library is known by the look of its path as well.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3\.\d+/")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/[^/]+")
_NESTED_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n    (.+)$', re.MULTILINE)


# ---- the owner of a file


def is_phalanx(file: str) -> bool:
    return file.startswith(PACKAGE_ROOT)


def is_users(file: str, program: str = "") -> bool:
    """The file is not torch's, phalanx's, the standard library's or another package's.

    ``program``: the installed package that the program lives in, which counts as the user's.
    """
    if is_phalanx(file) or file.startswith("<"):
        return False
    if program and file.startswith(program):
        return True
    return _LIBRARY.search(file) is None and not file.startswith(STANDARD)


def installed_package(file: str) -> str:
    """The installed package that a file belongs to, as the beginning of its files' paths; empty if it is in none.

    The package of the program itself counts as the user's code: `python -m package.train`.
    """
    found = _INSTALLED.match(file)
    return "" if found is None or is_phalanx(file) else found[0] + os.sep * (found.end() < len(file))


def program_package() -> str:
    """The installed package of the program that this process runs; empty for a script of the user's own."""
    return installed_package(getattr(sys.modules.get("__main__"), "__file__", None) or "")


def program_of(files: Iterable[str]) -> str:
    """The installed package that the program of a stack lives in. ``files``: of its lines, outermost first."""
    for file in files:
        if not (is_phalanx(file) or file.startswith("<") or file.endswith("/runpy.py")):
            return installed_package(file)
    return ""


# ---- the lines of a failure


def relevant_frames(ending: Ending) -> list[Frame]:
    """The user's last lines, and the library's line that raised, if that is another one."""
    from phalanx.events import Frame  # which a rank that records its lines does not need

    frames = list(ending.error.frames) if ending.error else list(reversed(ending.crash))
    program = program_of(frame.file for frame in frames)
    if ending.error is not None and IN_ANOTHER_PROCESS.match(ending.error.message):
        nested = [Frame(file, int(line), *rest) for file, line, *rest in _NESTED_FRAME.findall(ending.error.message)]
        frames = [frame for frame in frames if is_users(frame.file, program)] + nested
    users = [frame for frame in frames if is_users(frame.file, program)]
    last = [frame for frame in (frames[-1:] if users else frames) if not is_phalanx(frame.file)][-1:]
    return users[-3:] + [frame for frame in last if frame not in users]


def users_line(ending: Ending) -> Frame | None:
    """The user's innermost line in which the rank ended, if that is known."""
    program = program_of(frame.file for frame in (ending.error.frames if ending.error else reversed(ending.crash)))
    return next((frame for frame in reversed(relevant_frames(ending)) if is_users(frame.file, program)), None)


# ---- as text


def source_of(file: str, line: int) -> str:
    """The text of a line; empty when it cannot be read."""
    return dict(enumerate(lines_of(file), 1)).get(line, "").strip()


def lines_of(file: str) -> list[str]:
    """The lines of a plain file. A stack that somebody else has written may name a pipe, whose reading never ends."""
    return linecache.getlines(file) if Path(file).is_file() else []


def shorten_path(file: str) -> str:
    """The path relative to the working directory, for a file below it."""
    try:
        relative, here = os.path.relpath(file), os.getcwd()  # noqa: PTH109
    except (ValueError, OSError):  # the working directory is gone
        return file
    return file if relative.startswith("..") or here == "/" else relative


def clip(line: str) -> str:
    """Cuts a line to the width of a terminal, without characters that could change its state."""
    line = "".join(character if character.isprintable() else " " for character in line)
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
