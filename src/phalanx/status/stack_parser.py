"""Where the threads of a process stand: from the words of faulthandler or py-spy to records."""

from __future__ import annotations

import ast
import json
import linecache
import re
from collections.abc import Iterable, Sequence

from phalanx.messages import Count, Record, Text, replace
from phalanx.source_lines import is_users, lines_of, program_of, shorten_path, source_of

_THREAD = re.compile(
    r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*)\])?|Stack) \(most recent call first\):"
)
_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


class Line(Record, frozen=True):
    """One line of a stack."""

    file: Text
    line: Count
    function: Text
    source: Text = ""
    """Its text."""
    loops: tuple[tuple[int, int], ...] = ()
    """The first and last lines of the loops of its function that it stands in, outermost first."""
    is_users: bool = True

    def is_in(self, *files: str) -> bool:
        return self.file.endswith(files)


class Thread(Record, frozen=True):
    """One thread of a process."""

    lines: tuple[Line, ...]
    """Innermost first, as both tools give them."""
    name: Text = ""
    is_main: bool = False

    @property
    def users(self) -> tuple[Line, ...]:
        """The user's own lines."""
        return tuple(line for line in self.lines if line.is_users)

    @property
    def telling(self) -> Line | None:
        """The innermost line of the user's; where there is none, the innermost at all."""
        return next(iter(self.users or self.lines), None)

    @property
    def innermost(self) -> Line | None:
        return self.lines[0] if self.lines else None


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    return next((thread for thread in threads if thread.is_main), None)


def from_faulthandler(text: str) -> tuple[Thread, ...]:
    """What one process has written about itself, once."""
    found: list[tuple[str, list[Line]]] = []
    for row in text.splitlines():
        if begun := _THREAD.match(row):
            found.append((begun["name"] or "", []))
        elif (matched := _LINE.match(row)) and found:
            found[-1][1].append(_line(matched["file"], int(matched["line"]), matched["function"]))
    names = [name for name, _ in found]
    # A signal handler knows no names. The main thread began with a module's first line, and before all others: they are
    # listed newest first, and a very deep stack is cut off at that end.
    mains = [index for index, (_, lines) in enumerate(found) if lines and lines[-1].function == "<module>"]
    main = names.index("MainThread") if "MainThread" in names else mains[-1] if mains else len(found) - 1
    return _with_owner(Thread(tuple(lines), name, index == main) for index, (name, lines) in enumerate(found))


def from_py_spy(text: str) -> tuple[Thread, ...]:
    """``py-spy dump --json``; nothing when it could not look."""
    try:
        found = json.loads(text)
    except ValueError:
        return ()
    return _with_owner(
        Thread(
            tuple(_line(one["filename"], int(one["line"] or 0), one["name"]) for one in thread["frames"]),
            thread.get("thread_name") or "",
            thread["os_thread_id"] == thread["pid"] or thread.get("thread_name") == "MainThread",
        )
        for thread in found
    )


def _line(file: str, line: int, function: str) -> Line:
    return Line(_unescaped(file), line, _unescaped(function))


def _with_owner(threads: Iterable[Thread]) -> tuple[Thread, ...]:
    """The same with the user's lines marked; the main thread's outermost line tells where the program lives."""
    threads = tuple(threads)
    main = main_thread(threads)
    program = program_of(line.file for line in reversed(main.lines)) if main else ""
    return tuple(
        replace(thread, lines=tuple(replace(line, is_users=is_users(line.file, program)) for line in thread.lines))
        for thread in threads
    )


def _unescaped(text: str) -> str:
    """A signal handler can write ASCII only: \\u6587 stands for one character."""
    return _ESCAPED.sub(lambda found: chr(int(next(filter(None, found.groups())), 16)), text)


# ---- what the files say


def with_sources(threads: Sequence[Thread]) -> tuple[Thread, ...]:
    """The same with the text of each line, the loops of the user's, and paths as a person would write them.

    Only where the files are: another node has other files, and another working directory.
    """
    linecache.checkcache()  # a file may have been changed since the last hang
    return tuple(replace(thread, lines=tuple(map(_with_source, thread.lines))) for thread in threads)


def _with_source(line: Line) -> Line:
    loops = enclosing_loops("".join(lines_of(line.file)), line.line) if line.is_users else ()
    return replace(line, file=shorten_path(line.file), source=source_of(line.file, line.line), loops=loops)


def enclosing_loops(text: str, line: int) -> tuple[tuple[int, int], ...]:
    """First and last lines of the loops around a line, in its own function, outermost first."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # not Python, or being edited just now
        return ()
    around = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    around.sort(key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    loops: list[tuple[int, int]] = []
    for node in around:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            loops.clear()
        elif isinstance(node, ast.For | ast.While | ast.AsyncFor):
            body_ends = node.body[-1].end_lineno or 0  # a loop's `else` is behind it
            if line <= body_ends:
                loops.append((node.lineno, body_ends))
    return tuple(loops)
