"""Shows that a commit only moves code: every function and class of src/ is the same before and after it.

    python tools/same_ast.py HEAD~1 HEAD
    python tools/same_ast.py --renames names.json HEAD~1 HEAD

Compared is the multiset of the syntax trees of all top-level functions, classes and assignments below src/, without
docstrings, imports and positions. With a table of renames ({"old": "new"}), names and attributes are renamed before
they are compared; an old name with a dot in it is replaced within strings as well. Prints what differs, and exits with
1 if anything does.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--renames", type=Path, help='a JSON file: {"old name": "new name"}')
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", help="default: the working tree")
    options = parser.parse_args()
    renames = json.loads(options.renames.read_text()) if options.renames else {}
    before, after = (Counter(trees(revision, renames)) for revision in (options.before, options.after))
    gone, new = before - after, after - before
    for sign, trees_of_one in (("-", gone), ("+", new)):
        for tree in trees_of_one.elements():
            print(f"{sign} {tree[:200]}")
    print(f"{before.total()} definitions before, {after.total()} after; {gone.total()} gone, {new.total()} new")
    return 1 if gone or new else 0


def trees(revision: str | None, renames: Mapping[str, str]) -> Iterator[str]:
    """The definitions of all modules, as text."""
    for name in (
        _git("ls-tree", "-r", "--name-only", revision, "src") if revision else map(str, Path("src").rglob("*.py"))
    ):
        if name.endswith(".py"):
            source = Path(name).read_text() if revision is None else "\n".join(_git("show", f"{revision}:{name}"))
            for node in ast.parse(source).body:
                if not isinstance(node, ast.Import | ast.ImportFrom) and not _is_docstring(node):
                    yield ast.dump(_Plain(renames).visit(node))


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.splitlines()


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class _Plain(ast.NodeTransformer):
    """Without docstrings and imports, and with the new names."""

    def __init__(self, renames: Mapping[str, str]) -> None:
        self._renames = renames
        self._dotted = sorted((old for old in renames if "." in old), key=len, reverse=True)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                kept = [
                    one for one in value if not (_is_docstring(one) or isinstance(one, ast.Import | ast.ImportFrom))
                ]
                setattr(node, field, kept)
            elif isinstance(value, str):
                setattr(node, field, self._renamed(value))
        return super().generic_visit(node)

    def _renamed(self, name: str) -> str:
        for old in self._dotted:
            name = name.replace(old, self._renames[old])
        return self._renames.get(name, name)


if __name__ == "__main__":
    sys.exit(main())
