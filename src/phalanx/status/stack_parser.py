"""Parses the stacks of a process, as faulthandler or py-spy writes them."""

from __future__ import annotations

import ast
import json
import linecache
import re
from collections.abc import Iterable, Sequence

from phalanx.messages import Record, Text, replace
from phalanx.source_lines import is_users, lines_of, program_of, shorten_path, source_of
from phalanx.status.reading import CodeLine

_THREAD = re.compile(
    r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*)\])?|Stack) \(most recent call first\):"
)
_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


class Thread(Record, frozen=True):
    """The stack of a thread."""

    lines: tuple[CodeLine, ...]
    """The lines of its stack, innermost first."""
    name: Text = ""
    is_main: bool = False

    @property
    def users(self) -> tuple[CodeLine, ...]:
        """The user's own lines."""
        return tuple(line for line in self.lines if line.is_users)

    @property
    def shown(self) -> CodeLine | None:
        """The innermost line of the user's code; without one, the innermost line."""
        return next(iter(self.users or self.lines), None)


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    return next((thread for thread in threads if thread.is_main), None)


def from_faulthandler(text: str) -> tuple[Thread, ...]:
    """Parses the stacks that a process has written about itself."""
    found: list[tuple[str, list[CodeLine]]] = []
    for row in text.splitlines():
        if begun := _THREAD.match(row):
            found.append((begun["name"] or "", []))
        elif (matched := _LINE.match(row)) and found:
            found[-1][1].append(_line(matched["file"], int(matched["line"]), matched["function"]))
    names = [name for name, _ in found]
    # A signal handler writes no names. The main thread began in a module, and before all others: threads are listed
    # newest first, and a very deep stack is cut off at its outer end.
    mains = [index for index, (_, lines) in enumerate(found) if lines and lines[-1].function == "<module>"]
    main = names.index("MainThread") if "MainThread" in names else mains[-1] if mains else len(found) - 1
    return _with_owner(Thread(tuple(lines), name, index == main) for index, (name, lines) in enumerate(found))


def from_py_spy(text: str) -> tuple[Thread, ...]:
    """Parses the output of ``py-spy dump --json``; returns nothing when py-spy has failed."""
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


def _line(file: str, line: int, function: str) -> CodeLine:
    return CodeLine(_unescaped(file), line, _unescaped(function))


def _with_owner(threads: Iterable[Thread]) -> tuple[Thread, ...]:
    """Marks the user's lines. The main thread's outermost line is in the program."""
    threads = tuple(threads)
    main = main_thread(threads)
    program = program_of(line.file for line in reversed(main.lines)) if main else ""
    return tuple(
        replace(thread, lines=tuple(replace(line, is_users=is_users(line.file, program)) for line in thread.lines))
        for thread in threads
    )


def _unescaped(text: str) -> str:
    """Replaces \\u6587 by the character: a signal handler can write ASCII only."""
    return _ESCAPED.sub(lambda found: chr(int(next(filter(None, found.groups())), 16)), text)


# ---- the source files


def with_sources(threads: Sequence[Thread]) -> tuple[Thread, ...]:
    """Adds the text of each line and the loops around the user's, and shortens paths.

    To be called on the rank's node: another one has other files, and another working directory.
    """
    linecache.checkcache()  # a file may have been changed since the last hang
    return tuple(replace(thread, lines=tuple(map(_with_source, thread.lines))) for thread in threads)


def _with_source(line: CodeLine) -> CodeLine:
    loops = enclosing_loops("".join(lines_of(line.file)), line.line) if line.is_users else ()
    return replace(line, file=shorten_path(line.file), source=source_of(line.file, line.line), loops=loops)


def enclosing_loops(text: str, line: int) -> tuple[tuple[int, int], ...]:
    """Returns the first and last lines of the loops around a line in its function, outermost first."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # not Python, or just being edited
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
            body_ends = node.body[-1].end_lineno or 0  # without its `else`
            if line <= body_ends:
                loops.append((node.lineno, body_ends))
    return tuple(loops)
